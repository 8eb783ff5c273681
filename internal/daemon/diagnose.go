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
	"forkd.dev/forkd/internal/errdefs"
	"forkd.dev/forkd/internal/ident"
	"forkd.dev/forkd/internal/store/metadata"
	forkd "forkd.dev/forkd/sdk/go"
)

// diagnose looks at the host for `forkd doctor`.
func diagnose(ctx context.Context, dataDir, setting string) (cli.DoctorReport, error) {
	report := doctor.Run(ctx, doctor.Input{
		Facts:   doctor.Gather(ctx, dataDir),
		Engines: newEngines(dataDir).probeAll(ctx),
		Setting: setting,
		DataDir: dataDir,
		Daemon:  daemonVersion,
		Leftovers: func(ctx context.Context) ([]string, error) {
			return cleanup(ctx, dataDir, false)
		},
	})
	return report, nil
}

// listEngines looks at the engines for `forkd engine ls`.
func listEngines(ctx context.Context, dataDir, setting string) (doctor.EngineList, error) {
	speed := measureKVM(ctx)
	list := doctor.Engines(doctor.Facts{KVM: speed.KVM, KVMErr: speed.Err}, newEngines(dataDir).probeAll(ctx), setting)
	return list, ctx.Err()
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
	drivers []engine.Driver // of the engines that ran here and still can
	living  map[string]metadata.Sandbox
}

func newLeftovers(ctx context.Context, dataDir string, db *metadata.DB) (_ *leftovers, err error) {
	l := &leftovers{dataDir: dataDir, db: db, living: map[string]metadata.Sandbox{}}
	defer func() {
		if err != nil {
			l.close()
		}
	}()
	all := newEngines(dataDir)
	for _, entry := range all.entries {
		if _, err := os.Stat(all.dir(entry.name)); err != nil {
			continue // it never ran here
		}
		d, err := all.openOther(ctx, entry.name, db.Installation(), func(string, ...any) {})
		if err != nil {
			return nil, err
		}
		if d != nil {
			l.drivers = append(l.drivers, d)
		}
	}
	rows, err := db.ListSandboxes(ctx, metadata.SandboxFilter{Life: metadata.Living})
	if err != nil {
		return nil, err
	}
	for _, row := range rows {
		if adoptable(row) {
			l.living[machineOf(row)] = row
		}
	}
	return l, nil
}

func (l *leftovers) close() {
	for _, d := range l.drivers {
		_ = d.Close()
	}
}

// sweep finds processes and directories of no living sandbox.
func (l *leftovers) sweep(ctx context.Context, apply bool) ([]string, error) {
	ids := map[string]string{}
	for _, d := range l.drivers {
		orphans, err := d.Orphans(ctx)
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
	for _, d := range l.drivers {
		if err := d.Reap(ctx, id, dir); err != nil {
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
