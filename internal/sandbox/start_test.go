package sandbox

import (
	"archive/tar"
	"bytes"
	"context"
	"io"
	"os"
	"strings"
	"testing"
	"time"

	"forkd.dev/forkd/internal/errdefs"
)

func TestStartedProgram(t *testing.T) {
	w := newWorld(t, nil)
	sn := w.create(CreateSnapshot{Tag: "db", Image: "debian", Start: &Start{Command: "live 5432 is open", ReadyPort: 5432, ReadyLog: "is (open|up)$", Ready: "echo yes", Env: map[string]string{"A": "b"}}})
	if st := sn.Recipe.Start; st == nil || st.Command != "live 5432 is open" || st.ReadyPort != 5432 || st.Env["A"] != "b" || st.ReadyTimeout != defaultReadyTimeout {
		t.Errorf("recipe %+v", st)
	}
	m, err := w.store.Get(sn.ID)
	if err != nil || m.Agent.RunnerQuiet {
		t.Errorf("a prepared copy of it would be run ahead: %v", err)
	}
	child := w.create(CreateSnapshot{Tag: "db2", From: "db", Exec: []string{"write /x y"}})
	if m, err = w.store.Get(child.ID); err != nil || m.Agent.RunnerQuiet {
		t.Errorf("a prepared copy of its child would be run ahead: %v", err)
	}
}

// TestStartFails: no snapshot, the program's output in the error, nothing left.
func TestStartFails(t *testing.T) {
	w := newWorld(t, nil)
	for _, c := range []struct {
		name  string
		start Start
		class error
		says  []string
	}{
		{"ends", Start{Command: "end 3 no space"}, errdefs.ErrInvalid, []string{"exit code 3", "no space"}},
		{"never ready", Start{Command: "live still loading", Ready: "exit 1", ReadyTimeout: 300 * time.Millisecond}, errdefs.ErrTimeout, []string{"not ready within 300ms", `"exit 1" is asked`, "still loading"}},
		{"no port", Start{Command: "live x", ReadyPort: 80, ReadyTimeout: 300 * time.Millisecond}, errdefs.ErrTimeout, []string{"port 80"}},
		{"no line", Start{Command: "live x", ReadyLog: "^ready$", ReadyTimeout: 300 * time.Millisecond}, errdefs.ErrTimeout, []string{`matches "^ready$"`}},
		{"no program", Start{Command: "missing"}, errdefs.ErrNotFound, []string{"no such program"}},
	} {
		_, err := w.svc.CreateSnapshot(w.ctx(), CreateSnapshot{Tag: "x", Image: "debian", Start: &c.start}, nil)
		w.wantClass(err, c.class)
		for _, text := range c.says {
			if err == nil || !strings.Contains(err.Error(), text) {
				t.Errorf("%s: error %v does not say %q", c.name, err, text)
			}
		}
		w.empty()
	}
	if len(w.store.List()) != 0 {
		t.Error("a snapshot is left")
	}
}

func TestStartCanceled(t *testing.T) {
	w := newWorld(t, nil)
	ctx, cancel := context.WithCancel(w.ctx())
	progress := func(step string, _ float64) {
		if strings.HasPrefix(step, "waiting until") {
			cancel()
		}
	}
	_, err := w.svc.CreateSnapshot(ctx, CreateSnapshot{Tag: "x", Image: "debian", Start: &Start{Command: "live x", Ready: "exit 1"}}, progress)
	w.wantClass(err, context.Canceled)
	w.empty()
}

func TestCheckStart(t *testing.T) {
	t.Parallel()
	for _, bad := range []Start{
		{}, {Command: "x", ReadyPort: 70000}, {Command: "x", ReadyPort: -1}, {Command: "x", ReadyLog: "("}, {Command: "x", ReadyTimeout: -1},
		{Command: "x", Env: map[string]string{"A=B": ""}}, {Command: "x\x00"},
	} {
		if err := checkStart(&bad); errdefs.Class(err) != errdefs.ErrInvalid {
			t.Errorf("%+v: %v", bad, err)
		}
	}
}

func pack(t *testing.T, headers ...tar.Header) io.Reader {
	t.Helper()
	var buf bytes.Buffer
	a := tar.NewWriter(&buf)
	for _, h := range headers {
		text := h.Uname // a place for the content
		h.Uname, h.Size = "", int64(len(text))
		if err := a.WriteHeader(&h); err != nil {
			t.Fatal(err)
		}
		if _, err := io.WriteString(a, text); err != nil {
			t.Fatal(err)
		}
	}
	if err := a.Close(); err != nil {
		t.Fatal(err)
	}
	return &buf
}

func TestCopiedFiles(t *testing.T) {
	w := newWorld(t, nil)
	sn := w.create(CreateSnapshot{Tag: "x", Image: "debian", Files: pack(t, tar.Header{Typeflag: tar.TypeReg, Name: "srv/a", Uname: "content"})})
	if !strings.HasPrefix(sn.Recipe.Files, "sha256:") {
		t.Errorf("digest of the files is %q", sn.Recipe.Files)
	}
	if got := w.exec(w.fork("x", 1)[0].ID, "cat", "/srv/a"); got != "content" {
		t.Errorf("the fork has %q", got)
	}
	for _, bad := range []io.Reader{
		pack(t, tar.Header{Typeflag: tar.TypeChar, Name: "dev/x"}),
		strings.NewReader(strings.Repeat("no archive", 1000)),
		io.LimitReader(pack(t, tar.Header{Typeflag: tar.TypeReg, Name: "a", Uname: strings.Repeat("x", 10000)}), 3000),
	} {
		_, err := w.svc.CreateSnapshot(w.ctx(), CreateSnapshot{Tag: "y", Image: "debian", Files: bad}, nil)
		w.wantClass(err, errdefs.ErrInvalid)
	}
	entries, err := os.ReadDir(w.machines())
	if err != nil || len(entries) != 1 {
		t.Errorf("the sandbox directory has %v, %v", entries, err)
	}
}

func FuzzSpool(f *testing.F) {
	f.Add([]byte(strings.Repeat("\x00", 1024)))
	s := &Service{cfg: Config{Dir: f.TempDir()}}
	f.Fuzz(func(t *testing.T, b []byte) {
		files, err := s.spool(t.Context(), bytes.NewReader(b))
		if err != nil && errdefs.Class(err) != errdefs.ErrInvalid {
			t.Error(err)
		}
		files.close()
	})
}
