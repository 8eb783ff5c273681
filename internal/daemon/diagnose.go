package daemon

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"forkd.dev/forkd/internal/cli"
	"forkd.dev/forkd/internal/doctor"
	"forkd.dev/forkd/internal/engine"
	"forkd.dev/forkd/internal/engine/qemu"
	"forkd.dev/forkd/internal/errdefs"
	"forkd.dev/forkd/internal/ident"
	"forkd.dev/forkd/internal/store/metadata"
	forkd "forkd.dev/forkd/sdk/go"
)

// diagnose looks at the host for `forkd doctor`.
func diagnose(ctx context.Context, dataDir string) (cli.DoctorReport, error) {
	probe := probeQEMU(ctx)
	report := doctor.Run(ctx, doctor.Input{
		Facts:   doctor.Gather(ctx, dataDir),
		Engines: []doctor.Engine{{Name: qemu.Name, Probe: probe}},
		DataDir: dataDir,
		Daemon:  daemonVersion,
		Leftovers: func(ctx context.Context) ([]string, error) {
			return cleanup(ctx, dataDir, false)
		},
	})
	return report, nil
}

// probeQEMU starts the driver in a directory of its own, because doctor must work
// beside a running daemon and before there is a data directory.
func probeQEMU(ctx context.Context) engine.Probe {
	dir, err := os.MkdirTemp("", "forkd-doctor-")
	if err != nil {
		return engine.Probe{Reason: err.Error(), Remedy: "make room in the directory for temporary files"}
	}
	defer os.RemoveAll(dir)
	d, err := qemu.New(ctx, qemu.Config{Dir: dir, Installation: "doctor"})
	if err != nil {
		return engine.Probe{Reason: err.Error(), Remedy: errdefs.Hint(err)}
	}
	defer d.Close()
	return d.Probe(ctx)
}

func daemonVersion(ctx context.Context) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, 2*time.Second)
	defer cancel()
	c, err := forkd.New(forkd.Options{})
	if err != nil {
		return "", errdefs.As(errdefs.ErrUnavailable, err)
	}
	v, err := c.Version(ctx)
	if err != nil {
		return "", errdefs.As(errdefs.ErrUnavailable, err)
	}
	return v.Version, nil
}

// cleanup lists what earlier runs left in a data directory, and removes it if
// apply is set. Beside a running daemon there is nothing to do: it removed the
// leftovers when it started, and what is there now is in use.
func cleanup(ctx context.Context, dataDir string, apply bool) ([]string, error) {
	if _, err := os.Stat(dataDir); errors.Is(err, os.ErrNotExist) {
		return nil, nil
	}
	db, err := metadata.Open(ctx, metadata.Config{Dir: dataDir})
	if errors.Is(err, errdefs.ErrConflict) {
		return nil, nil
	}
	if errors.Is(err, os.ErrPermission) {
		return nil, errdefs.As(errdefs.ErrPermission, err)
	}
	if err != nil {
		return nil, err
	}
	defer db.Close()
	left, err := newLeftovers(ctx, dataDir, db)
	if err != nil {
		return nil, err
	}
	defer left.close()
	return left.sweep(ctx, apply)
}

// leftovers is what a data directory without a daemon can have too much of.
type leftovers struct {
	dataDir string
	db      *metadata.DB
	driver  *qemu.Driver // nil if QEMU is not installed: then nothing of it runs
	living  map[string]metadata.Sandbox
}

func newLeftovers(ctx context.Context, dataDir string, db *metadata.DB) (*leftovers, error) {
	l := &leftovers{dataDir: dataDir, db: db, living: map[string]metadata.Sandbox{}}
	dir := filepath.Join(dataDir, "engine", qemu.Name)
	if err := os.MkdirAll(dir, 0o711); err != nil {
		return nil, fmt.Errorf("look for leftovers: %w", err)
	}
	driver, err := qemu.New(ctx, qemu.Config{Dir: dir, Installation: db.Installation()})
	if err != nil && !errors.Is(err, errdefs.ErrUnavailable) {
		return nil, err
	}
	l.driver = driver
	rows, err := db.ListSandboxes(ctx, metadata.SandboxFilter{Life: metadata.Living})
	if err != nil {
		l.close()
		return nil, err
	}
	for _, row := range rows {
		// A sandbox of a private daemon should have ended with it.
		if row.Session == "" && row.State != "creating" && row.State != "stopping" {
			l.living[row.ID] = row
		}
	}
	return l, nil
}

func (l *leftovers) close() {
	if l.driver != nil {
		_ = l.driver.Close()
	}
}

// sweep finds processes and directories of no living sandbox.
func (l *leftovers) sweep(ctx context.Context, apply bool) ([]string, error) {
	ids := map[string]string{}
	if l.driver != nil {
		orphans, err := l.driver.Orphans(ctx)
		if err != nil {
			return nil, err
		}
		for _, id := range orphans {
			ids[id] = "process of sandbox " + id
		}
	}
	root := filepath.Join(l.dataDir, "sandboxes")
	dirs, err := os.ReadDir(root)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, fmt.Errorf("look for leftovers: %w", err)
	}
	for _, d := range dirs {
		if _, known := ids[d.Name()]; !known && ident.KindOf(d.Name()) == ident.Sandbox {
			ids[d.Name()] = "directory of sandbox " + d.Name()
		}
	}
	var found []string
	for id, what := range ids {
		if _, ok := l.living[id]; ok {
			continue
		}
		found = append(found, what)
		if !apply {
			continue
		}
		if err := l.remove(ctx, id, filepath.Join(root, id)); err != nil {
			return found, err
		}
	}
	return found, nil
}

func (l *leftovers) remove(ctx context.Context, id, dir string) error {
	if l.driver != nil {
		if err := l.driver.Reap(ctx, id, dir); err != nil {
			return err
		}
	}
	if err := os.RemoveAll(dir); err != nil {
		return fmt.Errorf("remove %s: %w", dir, err)
	}
	if err := l.db.DeleteSandboxes(ctx, id); err != nil && !errors.Is(err, errdefs.ErrNotFound) {
		return err
	}
	return nil
}
