package daemon

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"

	"forkd.dev/forkd/internal/engine"
	"forkd.dev/forkd/internal/errdefs"
	"forkd.dev/forkd/internal/ident"
	"forkd.dev/forkd/internal/sandbox"
	"forkd.dev/forkd/internal/store/metadata"
)

// A daemon has one engine, and its data directory may have served others: their
// sandboxes may run, and what a crash left of them only their own driver can end.

// machineOf is the id of a sandbox's machine.
func machineOf(row metadata.Sandbox) string {
	if row.MachineID != "" {
		return row.MachineID
	}
	return row.ID
}

// adoptable tells whether a daemon takes over a sandbox that it finds.
func adoptable(row metadata.Sandbox) bool {
	// A sandbox of a private daemon should have ended with it.
	return row.Session == "" && row.State != string(sandbox.Creating) && row.State != string(sandbox.Stopping)
}

// openOther starts the driver of an engine that is not the daemon's, in its own
// directory. It is nil if it cannot run here.
func (e *engines) openOther(ctx context.Context, name, installation string, logf func(string, ...any)) (engine.Driver, error) {
	if _, err := e.find(name); err != nil {
		logf("the journal has sandboxes of engine %s, which this version does not know", name)
		return nil, nil
	}
	d, err := e.open(ctx, name, engineSetup{installation: installation, logf: logf})
	if errors.Is(err, errdefs.ErrUnavailable) || errors.Is(err, errdefs.ErrUnsupported) {
		return nil, nil
	}
	return d, err
}

// running counts the sandboxes that run, by engine.
func (e *engines) running(ctx context.Context, db *metadata.DB, logf func(string, ...any)) (map[string]int, error) {
	rows, err := db.ListSandboxes(ctx, metadata.SandboxFilter{Life: metadata.Living})
	if err != nil {
		return nil, err
	}
	byEngine := map[string][]metadata.Sandbox{}
	for _, row := range rows {
		if adoptable(row) {
			byEngine[row.Engine] = append(byEngine[row.Engine], row)
		}
	}
	out := map[string]int{}
	for name, rows := range byEngine {
		alive, err := e.alive(ctx, name, db.Installation(), logf)
		if err != nil {
			return nil, err
		}
		for _, row := range rows {
			if alive[machineOf(row)] {
				out[name]++
			}
		}
	}
	return out, nil
}

// alive lists the machines of an engine that have a process. Of one that cannot be
// started any more, those that a process of the host names in its arguments: its
// program may have gone while they run.
func (e *engines) alive(ctx context.Context, name, installation string, logf func(string, ...any)) (_ map[string]bool, err error) {
	d, err := e.openOther(ctx, name, installation, logf)
	if err != nil {
		return nil, err
	}
	if d == nil {
		return namedByProcesses("/proc")
	}
	defer func() { err = errors.Join(err, d.Close()) }()
	ids, err := d.Orphans(ctx)
	if err != nil {
		return nil, fmt.Errorf("look for sandboxes of engine %s: %w", name, err)
	}
	out := map[string]bool{}
	for _, id := range ids {
		out[id] = true
	}
	return out, nil
}

// machineID finds ids of machines in the arguments of processes.
var machineID = regexp.MustCompile(`sb[a-z0-9]{20}`)

// namedByProcesses lists the machine ids in the arguments of all processes.
func namedByProcesses(proc string) (map[string]bool, error) {
	files, err := filepath.Glob(filepath.Join(proc, "[0-9]*", "cmdline"))
	if err != nil {
		return nil, fmt.Errorf("list processes: %w", err)
	}
	out := map[string]bool{}
	for _, path := range files {
		args, err := os.ReadFile(path)
		if err != nil {
			continue // it has ended
		}
		for _, id := range machineID.FindAllString(string(args), -1) {
			out[id] = true
		}
	}
	return out, nil
}

// reapOthers ends what is left of machines of engines other than mine. Their
// directories stay: the service removes them.
func (e *engines) reapOthers(ctx context.Context, mine string, db *metadata.DB, logf func(string, ...any)) error {
	left, err := e.leftDirs(ctx, mine, db)
	if err != nil || len(left) == 0 {
		return err
	}
	for _, entry := range e.entries {
		if _, err := os.Stat(e.dir(entry.name)); entry.name == mine || err != nil {
			continue
		}
		if err := e.reapEngine(ctx, entry.name, left, db.Installation(), logf); err != nil {
			return err
		}
	}
	return nil
}

// leftDirs lists the machines that have a directory and are of no sandbox of mine.
func (e *engines) leftDirs(ctx context.Context, mine string, db *metadata.DB) ([]string, error) {
	rows, err := db.ListSandboxes(ctx, metadata.SandboxFilter{Life: metadata.Living})
	if err != nil {
		return nil, err
	}
	known := map[string]bool{}
	for _, row := range rows {
		known[machineOf(row)] = row.Engine == mine
	}
	dirs, err := os.ReadDir(e.machines())
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, fmt.Errorf("look for leftovers: %w", err)
	}
	var out []string
	for _, d := range dirs {
		if ident.KindOf(d.Name()) == ident.Sandbox && !known[d.Name()] {
			out = append(out, d.Name())
		}
	}
	return out, nil
}

// machines is the directory of all machines.
func (e *engines) machines() string { return filepath.Join(e.dataDir, "sandboxes") }

func (e *engines) reapEngine(ctx context.Context, name string, left []string, installation string, logf func(string, ...any)) (err error) {
	d, err := e.openOther(ctx, name, installation, logf)
	if d == nil || err != nil {
		return err
	}
	defer func() { err = errors.Join(err, d.Close()) }()
	for _, id := range left {
		if err := d.Reap(ctx, id, filepath.Join(e.machines(), id)); err != nil {
			return fmt.Errorf("end what engine %s left: %w", name, err)
		}
	}
	return nil
}
