package kvm

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"forkd.dev/forkd/internal/engine"
	"forkd.dev/forkd/internal/engine/memimage"
	"forkd.dev/forkd/internal/errdefs"
	"forkd.dev/forkd/internal/linux"
	"forkd.dev/forkd/internal/vmmwire"
)

// Adopt takes over a running machine of an earlier daemon.
func (d *Driver) Adopt(ctx context.Context, id, dir string) (engine.Machine, error) {
	rec, err := readRecord(dir)
	if err != nil {
		return nil, fmt.Errorf("adopt %s: %w", id, err)
	}
	if rec.ID != id || rec.BootID != d.bootID {
		return nil, errdefs.New(errdefs.ErrNotFound, "adopt %s: its record is of another boot or machine", id)
	}
	handle, err := linux.Process{PID: rec.PID, Start: rec.Start}.Open()
	if err != nil {
		return nil, fmt.Errorf("adopt %s: %w", id, err)
	}
	m := &Machine{d: d, rec: rec, dir: dir, proc: handle, done: make(chan struct{}), left: make(chan struct{}), op: newTurn()}
	d.adoptMemory(rec)
	d.track(m)
	c, err := m.monitor(ctx)
	if err == nil && c.Hello().ID != id {
		err = errdefs.New(errdefs.ErrNotFound, "its process has machine %.40q", c.Hello().ID)
	}
	if err == nil && c.Hello().State == vmmwire.StateEnded {
		err = errdefs.New(errdefs.ErrNotFound, "its guest has ended")
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("adopt %s: %w", id, err), m.Kill(ctx))
	}
	return m, nil
}

// adoptMemory reopens the memory file that a living machine maps, so that new forks
// share memory with old ones.
func (d *Driver) adoptMemory(rec record) {
	if rec.MappedID == "" || d.images.Has(rec.MappedID) {
		return
	}
	f, err := mappedFile(rec.PID)
	if err != nil {
		d.cfg.Log("memory of %s is not shared with new forks: %v", rec.ID, err)
		return
	}
	st, err := f.Stat()
	if err != nil || st.Size() != int64(rec.Shape.MemoryMiB)<<20 || !linux.IsImmutable(f) {
		_ = f.Close()
		return
	}
	d.images.Put(rec.MappedID, f)
}

// mappedFile opens the memory file that process pid maps.
func mappedFile(pid int) (*os.File, error) {
	maps, err := linux.Mappings(pid)
	if err != nil {
		return nil, err
	}
	for _, mp := range maps {
		if strings.HasPrefix(mp.Path, "/memfd:"+memimage.FileName) {
			return os.Open(fmt.Sprintf("/proc/%d/map_files/%x-%x", pid, mp.Start, mp.End))
		}
	}
	return nil, errdefs.New(errdefs.ErrNotFound, "process %d maps no memory file", pid)
}

// Orphans lists the machines of this installation that have a process.
func (d *Driver) Orphans(context.Context) ([]string, error) {
	var ids []string
	err := d.eachProcess(func(_ int, name string) {
		if id := d.machineOf(name); id != "" {
			ids = append(ids, id)
		}
	})
	return ids, err
}

// Reap ends whatever process of machine id there is.
func (d *Driver) Reap(ctx context.Context, id, _ string) error {
	var victims []linux.Process
	var tokens []string
	err := d.eachProcess(func(pid int, name string) {
		if d.machineOf(name) != id {
			return
		}
		tokens = append(tokens, name)
		if p, err := linux.Identify(pid); err == nil {
			victims = append(victims, p)
		}
	})
	if err != nil {
		return fmt.Errorf("reap %s: %w", id, err)
	}
	if err := endProcesses(ctx, victims); err != nil {
		return fmt.Errorf("reap %s: %w", id, err)
	}
	for _, t := range tokens {
		if strings.HasPrefix(t, blankMark) {
			d.unclaim(t)
		}
	}
	return d.limits.Free(ctx, id)
}

// endProcesses kills all first and waits afterwards: the kernel takes a while to take
// each virtual machine down.
func endProcesses(ctx context.Context, victims []linux.Process) error {
	for _, p := range victims {
		if err := p.Kill(9); err != nil {
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

// eachProcess calls fn with the last part of the name of every monitor of this
// installation. Any user of the host can give a process any name.
func (d *Driver) eachProcess(fn func(pid int, name string)) error {
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return fmt.Errorf("list processes: %w", err)
	}
	prefix := d.processName("")
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil {
			continue
		}
		b, err := os.ReadFile(filepath.Join("/proc", e.Name(), "cmdline"))
		if err != nil || len(b) == 0 {
			continue
		}
		args := strings.Split(strings.TrimRight(string(b), "\x00"), "\x00")
		if name, ok := strings.CutPrefix(vmmwire.NameOf(args), prefix); ok {
			fn(pid, name)
		}
	}
	return nil
}
