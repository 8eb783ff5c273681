package service

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"

	"forkd.dev/forkd/deploy/systemd"
	"forkd.dev/forkd/internal/errdefs"
)

// Name is the unit's name, Group what may use the daemon's socket.
const (
	Name  = "forkd.service"
	Group = "forkd"
)

// Host is what the package needs of the machine it runs on.
type Host struct {
	UID     int
	Systemd bool   // it is process 1
	UnitDir string // where administrators' units lie
	// Run runs a program to its end and returns what it printed.
	Run func(ctx context.Context, name string, args ...string) (string, error)
	// HasGroup tells whether a group exists.
	HasGroup func(name string) bool
}

// Options say what to install.
type Options struct {
	Binary  string // absolute path of forkd
	DataDir string // absolute; "" is /var/lib/forkd
	Start   bool   // enable it and start it now
	DryRun  bool   // say what would be done
}

// Step is one thing that was done, or would be.
type Step struct {
	Text string `json:"step"`
	// Content is what a file gets.
	Content string `json:"content,omitempty"`
}

// plan is a list of steps with what does them.
type plan struct {
	steps []Step
	do    []func(context.Context) error
}

func (p *plan) add(s Step, do func(context.Context) error) {
	p.steps = append(p.steps, s)
	p.do = append(p.do, do)
}

// run does all steps unless dry, and returns those that were done.
func (p *plan) run(ctx context.Context, dry bool) ([]Step, error) {
	if dry {
		return p.steps, nil
	}
	for i, do := range p.do {
		if err := do(ctx); err != nil {
			return p.steps[:i], fmt.Errorf("%s: %w", p.steps[i].Text, err)
		}
	}
	return p.steps, nil
}

// Install makes forkd a service.
func (h Host) Install(ctx context.Context, o Options) ([]Step, error) {
	unit, err := Render(o)
	if err != nil {
		return nil, err
	}
	if err := h.check(o.DryRun); err != nil {
		return nil, err
	}
	var p plan
	if !h.HasGroup(Group) {
		p.add(Step{Text: "create group " + Group + ": its members may use the daemon"}, h.command("groupadd", "--system", Group))
	}
	path := filepath.Join(h.UnitDir, Name)
	p.add(Step{Text: "write " + path, Content: unit}, func(context.Context) error { return writeFile(path, unit) })
	p.add(Step{Text: "systemctl daemon-reload"}, h.command("systemctl", "daemon-reload"))
	if o.Start {
		p.add(Step{Text: "systemctl enable " + Name}, h.command("systemctl", "enable", Name))
		p.add(Step{Text: "systemctl restart " + Name}, h.command("systemctl", "restart", Name))
	}
	return p.run(ctx, o.DryRun)
}

// Uninstall removes the service; data and sandboxes stay.
func (h Host) Uninstall(ctx context.Context, o Options) ([]Step, error) {
	if err := h.check(o.DryRun); err != nil {
		return nil, err
	}
	path := filepath.Join(h.UnitDir, Name)
	if _, err := os.Stat(path); errors.Is(err, fs.ErrNotExist) {
		return nil, errdefs.New(errdefs.ErrNotFound, "forkd is no service here: there is no %s", path)
	}
	var p plan
	p.add(Step{Text: "systemctl disable --now " + Name}, h.command("systemctl", "disable", "--now", Name))
	p.add(Step{Text: "remove " + path}, func(context.Context) error { return os.Remove(path) })
	p.add(Step{Text: "systemctl daemon-reload"}, h.command("systemctl", "daemon-reload"))
	return p.run(ctx, o.DryRun)
}

// State is how the service is.
type State struct {
	Installed bool   `json:"installed"`
	Path      string `json:"path"`
	Active    string `json:"active"`  // as systemctl is-active says
	Enabled   string `json:"enabled"` // as systemctl is-enabled says
}

// Status looks at the service. It needs no rights.
func (h Host) Status(ctx context.Context) (State, error) {
	st := State{Path: filepath.Join(h.UnitDir, Name), Active: "unknown", Enabled: "unknown"}
	if _, err := os.Stat(st.Path); err == nil {
		st.Installed = true
	} else if !errors.Is(err, fs.ErrNotExist) {
		return st, fmt.Errorf("look for unit: %w", err)
	}
	if !h.Systemd {
		return st, nil
	}
	// Both fail for a service that is not active or not enabled, and say so.
	if out, _ := h.Run(ctx, "systemctl", "is-active", Name); strings.TrimSpace(out) != "" {
		st.Active = strings.TrimSpace(out)
	}
	if out, _ := h.Run(ctx, "systemctl", "is-enabled", Name); strings.TrimSpace(out) != "" && st.Installed {
		st.Enabled = strings.TrimSpace(out)
	}
	return st, nil
}

// check refuses what cannot work before anything is changed.
func (h Host) check(dry bool) error {
	switch {
	case dry:
		return nil
	case !h.Systemd:
		return errdefs.WithHint(errdefs.New(errdefs.ErrUnsupported, "systemd does not run here, so forkd cannot be a service of it"),
			"look at the unit with: forkd service install --dry-run; or start forkd serve from what runs services here")
	case h.UID != 0:
		return errdefs.WithHint(errdefs.New(errdefs.ErrPermission, "only root can change services of the system"), "sudo forkd service install")
	}
	return nil
}

func (h Host) command(name string, args ...string) func(context.Context) error {
	return func(ctx context.Context) error {
		out, err := h.Run(ctx, name, args...)
		if err != nil {
			return errdefs.As(errdefs.ErrUnavailable, fmt.Errorf("%w: %s", err, strings.TrimSpace(out)))
		}
		return nil
	}
}

// plainPath has nothing that a unit file gives a meaning to.
var plainPath = regexp.MustCompile(`^/[A-Za-z0-9/_.+-]*$`)

// hidden are the directories that the unit's hardening hides from the daemon.
func hidden() []string { return []string{"/home", "/root", "/run/user", "/tmp", "/var/tmp"} }

// Render returns the unit file for o.
func Render(o Options) (string, error) {
	if o.DataDir == "" {
		o.DataDir = systemd.DataDir
	}
	for what, path := range map[string]string{"program": o.Binary, "data directory": o.DataDir} {
		if !plainPath.MatchString(path) || filepath.Clean(path) != path {
			return "", errdefs.New(errdefs.ErrInvalid, "%s %.200q is not an absolute path of plain characters", what, path)
		}
		for _, dir := range hidden() {
			if path == dir || strings.HasPrefix(path, dir+"/") {
				return "", errdefs.WithHint(errdefs.New(errdefs.ErrInvalid, "%s %s is below %s, which a service does not see", what, path, dir),
					"put the program in its place first: install -m 755 bin/forkd %s", systemd.Binary)
			}
		}
	}
	var out strings.Builder
	for line := range strings.Lines(systemd.Unit) {
		if strings.HasPrefix(line, "StateDirectory") && o.DataDir != systemd.DataDir {
			continue // it is always below /var/lib
		}
		if !strings.HasPrefix(line, "#") {
			line = strings.ReplaceAll(line, systemd.Binary, o.Binary)
			line = strings.ReplaceAll(line, systemd.DataDir, o.DataDir)
		}
		out.WriteString(line)
	}
	return out.String(), nil
}

// writeFile replaces a unit file as a whole.
func writeFile(path, text string) error {
	tmp := path + ".forkd-new"
	if err := os.WriteFile(tmp, []byte(text), 0o644); err != nil {
		return err
	}
	if err := os.Rename(tmp, path); err != nil {
		return errors.Join(err, os.Remove(tmp))
	}
	return nil
}
