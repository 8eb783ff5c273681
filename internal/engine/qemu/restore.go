package qemu

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"

	"forkd.dev/forkd/internal/engine"
	"forkd.dev/forkd/internal/engine/memimage"
	"forkd.dev/forkd/internal/errdefs"
	"forkd.dev/forkd/internal/linux"
)

// Boot starts a machine from its root file system.
func (d *Driver) Boot(ctx context.Context, spec engine.Spec) (engine.Machine, error) {
	memory, err := memimage.Empty(spec.Shape.MemoryMiB)
	if err != nil {
		return nil, fmt.Errorf("boot %s: %w", spec.ID, err)
	}
	defer memory.Close()
	m, err := d.launch(ctx, spec, launchPlan{memory: memory})
	if err != nil {
		return nil, fmt.Errorf("boot %s: %w", spec.ID, err)
	}
	return m, nil
}

var _ engine.ColdBooter = (*Driver)(nil)

// BootFrom starts a machine from the disk of a state. Its disk layers become overlays of
// the machine, by links: so a capture holds them, as one of a machine that was booted
// holds all that the root file system has not.
func (d *Driver) BootFrom(ctx context.Context, spec engine.Spec, chain []engine.State) (engine.Machine, error) {
	if len(chain) == 0 {
		return nil, errdefs.New(errdefs.ErrInvalid, "boot %s: no state given", spec.ID)
	}
	memory, err := memimage.Empty(spec.Shape.MemoryMiB)
	if err != nil {
		return nil, fmt.Errorf("boot %s: %w", spec.ID, err)
	}
	defer memory.Close()
	lower, err := linkLayers(spec.Dir, chain)
	if err != nil {
		return nil, fmt.Errorf("boot %s: %w", spec.ID, err)
	}
	m, err := d.launch(ctx, spec, launchPlan{memory: memory, lower: lower})
	if err != nil {
		return nil, fmt.Errorf("boot %s from %s: %w", spec.ID, chain[len(chain)-1].ID, err)
	}
	return m, nil
}

// linkLayers links the disk layers of all states into dir and returns their names there,
// lowest first.
func linkLayers(dir string, chain []engine.State) ([]string, error) {
	var names []string
	for _, s := range chain {
		files, err := memimage.OpenArtifacts(s, kindDisk)
		for _, f := range files {
			name := lowerName(len(names))
			if err == nil {
				err = os.Link(f.Name(), filepath.Join(dir, name))
			}
			names = append(names, name)
			_ = f.Close()
		}
		if err != nil {
			return nil, err
		}
	}
	return names, nil
}

// Restore makes a stopped machine from the last state of chain.
func (d *Driver) Restore(ctx context.Context, spec engine.Spec, chain []engine.State) (engine.Machine, error) {
	if len(chain) == 0 {
		return nil, errdefs.New(errdefs.ErrInvalid, "restore %s: no state given", spec.ID)
	}
	d.pool.Busy(1)
	defer d.pool.Busy(-1)
	m, err := d.restore(ctx, spec, chain)
	if err != nil {
		return nil, fmt.Errorf("restore %s from %s: %w", spec.ID, chain[len(chain)-1].ID, err)
	}
	return m, nil
}

func (d *Driver) restore(ctx context.Context, spec engine.Spec, chain []engine.State) (*Machine, error) {
	layers, err := memimage.OpenLayers(chain, int64(spec.Shape.MemoryMiB)<<20)
	if err != nil {
		return nil, err
	}
	defer layers.Close()
	base := d.base(chain, layers)
	memory, release, err := d.images.Get(ctx, chain[:base+1], spec.Shape.MemoryMiB)
	if err != nil {
		return nil, err
	}
	defer d.images.Trim(d.mapped) // after the release: it was built, or will be unmapped again
	defer release()
	m, err := d.launch(ctx, spec, launchPlan{memory: memory, mapped: chain[base].ID, chain: chain})
	if err != nil {
		return nil, err
	}
	err = m.inject(layers, base)
	if err == nil {
		err = m.load(ctx, chain[len(chain)-1])
	}
	if err != nil {
		if line := lastLine(filepath.Join(spec.Dir, logFile)); line != "" {
			err = fmt.Errorf("%w (QEMU says: %s)", err, line)
		}
		return nil, errors.Join(err, m.Kill(context.WithoutCancel(ctx)))
	}
	return m, nil
}

// launchPlan is what a new process maps and opens. An empty chain means a boot.
type launchPlan struct {
	memory *os.File
	mapped string // id of the snapshot whose image memory is; "" for a boot
	chain  []engine.State
	lower  []string // overlays of others in the machine's directory, for a boot from a disk
}

// launch starts the process of a machine and connects its monitor. On error
// nothing is left but files in spec.Dir.
func (d *Driver) launch(ctx context.Context, spec engine.Spec, plan launchPlan) (*Machine, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	p := &process{
		name: d.processName(spec.ID), shape: spec.Shape, memory: plan.memory,
		incoming: len(plan.chain) > 0,
		confine:  confinement{root: d.isRoot, uid: d.pickUID(), dir: d.emptyDir},
	}
	if !p.incoming {
		p.kernel, p.initrd, p.cmdline = spec.Root.Kernel, spec.Root.Initramfs, kernelCmdline(d.tscKHz)
	}
	files, err := p.open(spec, plan)
	defer func() {
		for _, f := range files {
			_ = f.Close()
		}
	}()
	if err != nil {
		return nil, err
	}
	cmd, err := d.start(p, filepath.Join(spec.Dir, logFile))
	if err != nil {
		return nil, err
	}
	m := &Machine{d: d, dir: spec.Dir, cmd: cmd, done: make(chan struct{}), left: make(chan struct{}), full: make(chan struct{}, 1), op: newTurn()}
	m.rec.Disks, m.rec.Overlays = len(p.disks)-len(plan.lower), append(plan.lower, overlayName(0))
	if err := m.register(ctx, spec, plan, p.confine.uid); err != nil {
		return nil, err
	}
	return m, nil
}

// register makes a started process a machine: limits, record, monitor.
func (m *Machine) register(ctx context.Context, spec engine.Spec, plan launchPlan, uid int) error {
	pid := m.cmd.Process.Pid
	proc, err := linux.Identify(pid)
	if err == nil {
		m.proc, err = proc.Open()
	}
	if err != nil {
		_ = m.cmd.Process.Kill()
		_ = m.cmd.Wait()
		return err
	}
	m.rec = record{
		Version: recordVersion, ID: spec.ID, PID: pid, Start: proc.Start, BootID: m.d.bootID,
		UID: uid, Shape: spec.Shape, Qualifier: m.d.cfg.Installation, Disks: m.rec.Disks, Overlays: m.rec.Overlays,
	}
	if len(plan.chain) > 0 {
		m.rec.MappedID = plan.mapped
		m.rec.ForkedID = plan.chain[len(plan.chain)-1].ID
	}
	m.d.track(m)
	err = m.d.limit(spec, pid)
	if err == nil {
		err = writeRecord(spec.Dir, m.rec)
	}
	if err == nil {
		_, err = m.monitor(ctx)
	}
	if err != nil {
		if line := lastLine(filepath.Join(spec.Dir, logFile)); line != "" {
			err = fmt.Errorf("%w (QEMU says: %s)", err, line)
		}
		return errors.Join(err, m.Kill(context.WithoutCancel(ctx)))
	}
	return nil
}

// open opens or creates the files of a process. The caller closes the files
// returned, also on error.
func (p *process) open(spec engine.Spec, plan launchPlan) ([]*os.File, error) {
	var files []*os.File
	keep := func(f *os.File, err error) (*os.File, error) {
		if err == nil {
			files = append(files, f)
		}
		return f, err
	}
	var err error
	if p.qmp, err = keep(linux.ListenUnix(filepath.Join(spec.Dir, qmpSocket))); err != nil {
		return files, err
	}
	if p.agent, err = keep(linux.ListenUnix(filepath.Join(spec.Dir, agentSocket))); err != nil {
		return files, err
	}
	if p.overlay, err = newOverlay(filepath.Join(spec.Dir, overlayName(0)), spec.Shape.DiskMiB); err != nil {
		return files, err
	}
	files = append(files, p.overlay.rw, p.overlay.ro)
	base, err := keep(os.Open(spec.Root.Disk))
	if err != nil {
		return files, fmt.Errorf("open root file system: %w", err)
	}
	p.disks = append(p.disks, diskFile{file: base, format: "raw"})
	for _, name := range plan.lower {
		f, err := keep(os.Open(filepath.Join(spec.Dir, name)))
		if err != nil {
			return files, fmt.Errorf("open disk layer: %w", err)
		}
		p.disks = append(p.disks, diskFile{file: f, format: "qcow2"})
	}
	for _, s := range plan.chain {
		layers, err := memimage.OpenArtifacts(s, kindDisk)
		files = append(files, layers...)
		if err != nil {
			return files, err
		}
		for _, f := range layers {
			p.disks = append(p.disks, diskFile{file: f, format: "qcow2"})
		}
	}
	return files, nil
}

// lowerName is the file of the i-th layer of another's disk in a machine's directory.
func lowerName(i int) string { return fmt.Sprintf("%s%03d.qcow2", lowerPrefix, i) }

const lowerPrefix = "lower"

// overlayName is the file of a machine's i-th overlay.
func overlayName(i int) string { return fmt.Sprintf("disk%d.qcow2", i) }

// newOverlay creates an empty overlay and opens it both ways.
func newOverlay(path string, diskMiB int) (o overlayFiles, err error) {
	if err := createOverlay(path, int64(diskMiB)<<20); err != nil {
		return o, err
	}
	if o.rw, err = os.OpenFile(path, os.O_RDWR, 0); err != nil {
		return o, fmt.Errorf("open overlay: %w", err)
	}
	if o.ro, err = os.Open(path); err != nil {
		_ = o.rw.Close()
		return overlayFiles{}, fmt.Errorf("open overlay: %w", err)
	}
	return o, nil
}

func (o overlayFiles) close() {
	_ = o.rw.Close()
	_ = o.ro.Close()
}

// load puts the device state of s into a machine that was started for it. The
// agent's port is connected first: a port that has no peer at load can stay
// throttled with a half-sent message.
func (m *Machine) load(ctx context.Context, s engine.State) error {
	state, err := memimage.OpenArtifact(s, kindDevice)
	if err != nil {
		return err
	}
	defer state.Close()
	conn, err := linux.DialUnix(ctx, filepath.Join(m.dir, agentSocket))
	if err != nil {
		return err
	}
	done := make(chan string, 1)
	m.mu.Lock()
	m.predialed, m.migrated = net.Conn(conn), done
	m.mu.Unlock()
	events := map[string]any{"capabilities": []any{map[string]any{"capability": "events", "state": true}}}
	if err := m.command(ctx, "migrate-set-capabilities", events, nil); err != nil {
		return err
	}
	if err := m.command(ctx, "getfd", map[string]any{"fdname": "state"}, nil, state); err != nil {
		return err
	}
	if err := m.command(ctx, "migrate-incoming", map[string]any{"uri": "fd:state"}, nil); err != nil {
		return err
	}
	select {
	case status := <-done:
		if status != "completed" {
			return errdefs.New(errdefs.ErrCorrupt, "load device state of %s: %s", s.ID, status)
		}
		return nil
	case <-m.done:
		return errdefs.New(errdefs.ErrCorrupt, "load device state of %s: %s", s.ID, m.Reason())
	case <-ctx.Done():
		return fmt.Errorf("load device state of %s: %w", s.ID, ctx.Err())
	}
}
