package gvisor

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"forkd.dev/forkd/internal/ident"
	"forkd.dev/forkd/internal/linux"
)

// Orphans lists the machines of this installation that have a process.
func (d *Driver) Orphans(context.Context) ([]string, error) {
	seen := map[string]bool{}
	err := d.eachProcess(func(id string, _ int) { seen[id] = true })
	ids := make([]string, 0, len(seen))
	for id := range seen {
		ids = append(ids, id)
	}
	slices.Sort(ids)
	return ids, err
}

// Reap ends whatever processes of machine id there are, and removes its records.
func (d *Driver) Reap(ctx context.Context, id, _ string) error {
	for range 3 { // one that was starting another may have done so
		var victims []linux.Process
		err := d.eachProcess(func(of string, pid int) {
			if p, err := linux.Identify(pid); err == nil && of == id {
				victims = append(victims, p)
			}
		})
		if err != nil {
			return fmt.Errorf("reap %s: %w", id, err)
		}
		if len(victims) == 0 {
			break
		}
		if err := endProcesses(ctx, victims); err != nil {
			return fmt.Errorf("reap %s: %w", id, err)
		}
	}
	d.removeRecords(id)
	return d.limits.free(ctx, id)
}

func endProcesses(ctx context.Context, victims []linux.Process) error {
	for _, p := range victims {
		if err := p.Kill(unix.SIGKILL); err != nil {
			return err
		}
	}
	for _, p := range victims {
		if err := p.Wait(ctx); err != nil {
			return err
		}
	}
	return nil
}

// removeRecords removes what runsc keeps of a sandbox. runsc looks for a place for
// its socket elsewhere if the path in its own directory is too long.
func (d *Driver) removeRecords(id string) {
	for _, dir := range []string{d.runDir, "/var/run", "/run", "/tmp"} {
		_ = os.Remove(filepath.Join(dir, "runsc-"+id+".sock"))
	}
	records, _ := filepath.Glob(filepath.Join(d.runDir, id+"_sandbox:*"))
	for _, path := range records {
		_ = os.Remove(path)
	}
}

// eachProcess calls fn for every process of this installation's sandboxes: runsc at
// work, user-space kernels and gofers. Stubs end with their kernel.
func (d *Driver) eachProcess(fn func(id string, pid int)) error {
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return fmt.Errorf("list processes: %w", err)
	}
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil {
			continue
		}
		b, err := os.ReadFile(filepath.Join("/proc", e.Name(), "cmdline"))
		if err != nil || len(b) == 0 {
			continue
		}
		if id := d.sandboxOf(strings.Split(strings.TrimRight(string(b), "\x00"), "\x00")); id != "" {
			fn(id, pid)
		}
	}
	return nil
}

// sandboxOf returns the sandbox that a command line is about, or "". Any user of the
// host can write such a line; nothing but ids comes out of it. A gofer does not name
// its sandbox, but its bundle lies in the machine's directory.
func (d *Driver) sandboxOf(args []string) string {
	if !slices.Contains(args, "--root="+d.runDir) {
		return ""
	}
	if last := args[len(args)-1]; ident.KindOf(last) == ident.Sandbox {
		return last
	}
	for i, a := range args {
		path, ok := strings.CutPrefix(a, "--bundle=")
		if !ok && a == "--bundle" && i+1 < len(args) {
			path, ok = args[i+1], true
		}
		if id := filepath.Base(filepath.Dir(path)); ok && ident.KindOf(id) == ident.Sandbox {
			return id
		}
	}
	return ""
}

// children lists the processes below pid, which are the stubs of a user-space kernel.
func children(pid int) []int {
	var all []int
	todo := []int{pid}
	for len(todo) > 0 {
		dir := filepath.Join("/proc", strconv.Itoa(todo[0]), "task")
		todo = todo[1:]
		tasks, _ := os.ReadDir(dir)
		for _, t := range tasks {
			b, _ := os.ReadFile(filepath.Join(dir, t.Name(), "children"))
			for f := range strings.FieldsSeq(string(b)) {
				if child, err := strconv.Atoi(f); err == nil {
					all, todo = append(all, child), append(todo, child)
				}
			}
		}
	}
	return all
}
