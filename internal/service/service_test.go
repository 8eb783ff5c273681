package service

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"forkd.dev/forkd/deploy/systemd"
	"forkd.dev/forkd/internal/errdefs"
)

// fakeHost notes the commands that are run.
func fakeHost(t *testing.T) (Host, *[]string) {
	var ran []string
	return Host{
		Systemd: true, UnitDir: t.TempDir(),
		Run: func(_ context.Context, name string, args ...string) (string, error) {
			ran = append(ran, name+" "+strings.Join(args, " "))
			return "", nil
		},
		HasGroup: func(string) bool { return false },
	}, &ran
}

func TestInstallAndUninstall(t *testing.T) {
	h, ran := fakeHost(t)
	o := Options{Binary: "/opt/forkd/forkd", DataDir: "/srv/forkd", Start: true}
	steps, err := h.Install(t.Context(), o)
	if err != nil || len(steps) != 5 {
		t.Fatalf("steps are %+v, %v", steps, err)
	}
	want := []string{"groupadd --system forkd", "systemctl daemon-reload", "systemctl enable forkd.service", "systemctl restart forkd.service"}
	if !slices.Equal(*ran, want) {
		t.Errorf("ran %q, want %q", *ran, want)
	}
	b, err := os.ReadFile(filepath.Join(h.UnitDir, Name))
	if err != nil {
		t.Fatal(err)
	}
	for _, line := range []string{"ExecStart=/opt/forkd/forkd serve --data-dir /srv/forkd", "ReadWritePaths=/srv/forkd", "Type=notify", "Delegate=yes", "KillMode=process"} {
		if !slices.Contains(strings.Split(string(b), "\n"), line) {
			t.Errorf("the unit lacks %q:\n%s", line, b)
		}
	}
	if strings.Contains(string(b), "\nStateDirectory=") {
		t.Error("a state directory beside the data directory is asked for")
	}
	*ran = nil
	if _, err := h.Uninstall(t.Context(), Options{}); err != nil {
		t.Fatal(err)
	}
	if want := []string{"systemctl disable --now forkd.service", "systemctl daemon-reload"}; !slices.Equal(*ran, want) {
		t.Errorf("ran %q, want %q", *ran, want)
	}
	if left, _ := os.ReadDir(h.UnitDir); len(left) != 0 {
		t.Errorf("%v are left", left)
	}
	if _, err := h.Uninstall(t.Context(), Options{}); !errors.Is(err, errdefs.ErrNotFound) {
		t.Errorf("a second time: %v", err)
	}
}

func TestDryRunChangesNothing(t *testing.T) {
	h, ran := fakeHost(t)
	h.Systemd, h.UID = false, 1000
	steps, err := h.Install(t.Context(), Options{Binary: systemd.Binary, DryRun: true, Start: true})
	if err != nil || len(steps) != 5 || steps[1].Content != systemd.Unit {
		t.Errorf("steps are %+v, %v", steps, err)
	}
	if left, _ := os.ReadDir(h.UnitDir); len(left) != 0 || len(*ran) != 0 {
		t.Errorf("%v are there, %v was run", left, *ran)
	}
}

func TestInstallRefuses(t *testing.T) {
	good := Options{Binary: systemd.Binary}
	for name, c := range map[string]struct {
		host func(*Host)
		o    Options
		want error
	}{
		"no systemd":     {func(h *Host) { h.Systemd = false }, good, errdefs.ErrUnsupported},
		"not root":       {func(h *Host) { h.UID = 1000 }, good, errdefs.ErrPermission},
		"relative":       {nil, Options{Binary: "bin/forkd"}, errdefs.ErrInvalid},
		"specifier":      {nil, Options{Binary: "/opt/%h/forkd"}, errdefs.ErrInvalid},
		"second line":    {nil, Options{Binary: "/opt/forkd\nUser=root"}, errdefs.ErrInvalid},
		"in a home":      {nil, Options{Binary: "/root/forkd"}, errdefs.ErrInvalid},
		"data in /tmp":   {nil, Options{Binary: systemd.Binary, DataDir: "/tmp/x"}, errdefs.ErrInvalid},
		"not clean":      {nil, Options{Binary: systemd.Binary, DataDir: "/var/../root/x"}, errdefs.ErrInvalid},
		"command failed": {func(h *Host) { h.Run = failing }, good, errdefs.ErrUnavailable},
	} {
		t.Run(name, func(t *testing.T) {
			h, _ := fakeHost(t)
			if c.host != nil {
				c.host(&h)
			}
			_, err := h.Install(t.Context(), c.o)
			if !errors.Is(err, c.want) {
				t.Errorf("error is %v, want class %v", err, c.want)
			}
		})
	}
}

func failing(context.Context, string, ...string) (string, error) {
	return "it is broken", errors.New("exit status 1")
}

func TestStatus(t *testing.T) {
	h, _ := fakeHost(t)
	h.Run = func(_ context.Context, _ string, args ...string) (string, error) {
		return map[string]string{"is-active": "active\n", "is-enabled": "enabled\n"}[args[0]], nil
	}
	if st, err := h.Status(t.Context()); err != nil || st.Installed || st.Enabled != "unknown" {
		t.Errorf("before: %+v, %v", st, err)
	}
	if err := writeFile(filepath.Join(h.UnitDir, Name), systemd.Unit); err != nil {
		t.Fatal(err)
	}
	if st, err := h.Status(t.Context()); err != nil || !st.Installed || st.Active != "active" || st.Enabled != "enabled" {
		t.Errorf("after: %+v, %v", st, err)
	}
}

// TestUnitIsValid has systemd read the unit, with a program that exists.
func TestUnitIsValid(t *testing.T) {
	analyze, err := exec.LookPath("systemd-analyze")
	if err != nil {
		t.Skip("systemd-analyze is not installed")
	}
	text, err := Render(Options{Binary: "/bin/true"})
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), Name)
	if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
	out, err := exec.CommandContext(t.Context(), analyze, "verify", path).CombinedOutput()
	if err != nil || strings.Contains(string(out), Name) {
		t.Errorf("systemd-analyze verify: %v\n%s", err, out)
	}
}

// TestUnitKeepsItsPromises: what the design demands of the unit, and what would
// break it.
func TestUnitKeepsItsPromises(t *testing.T) {
	set := map[string]string{}
	for line := range strings.Lines(systemd.Unit) {
		if k, v, ok := strings.Cut(strings.TrimSpace(line), "="); ok && !strings.HasPrefix(line, "#") {
			set[k] = v
		}
	}
	for k, v := range map[string]string{"Type": "notify", "KillMode": "process", "Delegate": "yes", "OOMPolicy": "continue", "Slice": "forkd.slice"} {
		if set[k] != v {
			t.Errorf("%s is %q, want %q", k, set[k], v)
		}
	}
	for _, k := range []string{"MemoryDenyWriteExecute", "RestrictNamespaces", "PrivateDevices", "RestrictSUIDSGID", "ProtectControlGroups", "DynamicUser", "PrivateUsers"} {
		if v, ok := set[k]; ok {
			t.Errorf("%s=%s keeps the daemon from working", k, v)
		}
	}
}
