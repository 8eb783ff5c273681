package kvm

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"forkd.dev/forkd/internal/engine"
	"forkd.dev/forkd/internal/engine/memimage"
	"forkd.dev/forkd/internal/errdefs"
	"forkd.dev/forkd/internal/linux"
	"forkd.dev/forkd/internal/vmmwire"
)

// Boot starts a machine from its root file system.
func (d *Driver) Boot(ctx context.Context, spec engine.Spec) (engine.Machine, error) {
	m, err := d.boot(ctx, spec, nil)
	if err != nil {
		return nil, fmt.Errorf("boot %s: %w", spec.ID, err)
	}
	return m, nil
}

var _ engine.ColdBooter = (*Driver)(nil)

// BootFrom starts a machine from the disk of the last state of chain. So that a capture of
// it needs no other state, its overlay begins with all that the layers of chain hold.
func (d *Driver) BootFrom(ctx context.Context, spec engine.Spec, chain []engine.State) (engine.Machine, error) {
	if len(chain) == 0 {
		return nil, errdefs.New(errdefs.ErrInvalid, "boot %s: no state given", spec.ID)
	}
	m, err := d.boot(ctx, spec, chain)
	if err != nil {
		return nil, fmt.Errorf("boot %s from %s: %w", spec.ID, chain[len(chain)-1].ID, err)
	}
	return m, nil
}

// boot starts a machine from its image or, if chain is not empty, from the disk of its last state.
func (d *Driver) boot(ctx context.Context, spec engine.Spec, chain []engine.State) (*Machine, error) {
	var f files
	defer f.close()
	msg := &vmmwire.Boot{ID: spec.ID, Shape: wireShape(spec.Shape), Cmdline: kernelCmdline(d.tscKHz)}
	var err error
	if msg.Kernel, err = f.open(spec.Root.Kernel); err != nil {
		return nil, fmt.Errorf("open kernel: %w", err)
	}
	if msg.Initrd, err = f.open(spec.Root.Initramfs); err != nil {
		return nil, fmt.Errorf("open initramfs: %w", err)
	}
	plan := launchPlan{message: msg, overlays: []string{overlayName(0)}}
	var below []engine.State
	if len(chain) > 0 {
		// The layers become one of the machine's own, the lowest.
		state := engine.State{ID: spec.ID, Dir: spec.Dir, Artifacts: []engine.Artifact{{Name: overlayName(0), Kind: kindDisk}}}
		if err := mergeChain(ctx, chain, filepath.Join(spec.Dir, overlayName(0))); err != nil {
			return nil, err
		}
		below = append(below, state)
		plan.overlays = append(plan.overlays, overlayName(1))
	}
	if msg.Devices, err = f.devices(spec, below, plan.overlays[len(plan.overlays)-1]); err != nil {
		return nil, err
	}
	plan.files = f.list
	return d.launch(ctx, spec, plan)
}

// mergeChain writes the disk of the last state of chain as one layer.
func mergeChain(ctx context.Context, chain []engine.State, out string) error {
	m := diskMerge{out: out}
	defer func() {
		for _, f := range m.files {
			_ = f.Close()
		}
	}()
	for _, s := range chain {
		some, err := memimage.OpenArtifacts(s, kindDisk)
		m.files = append(m.files, some...)
		if err != nil {
			return err
		}
	}
	return mergeDisks(ctx, m)
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
	last := chain[len(chain)-1]
	state, err := memimage.OpenArtifact(last, kindDevice)
	if err != nil {
		return nil, err
	}
	var f files
	defer f.close()
	msg := &vmmwire.Restore{ID: spec.ID, Shape: wireShape(spec.Shape), State: f.add(state)}
	rand.Read(msg.Generation[:])
	if msg.Devices, err = f.devices(spec, chain, overlayName(0)); err != nil {
		return nil, err
	}
	p, err := d.planMemory(ctx, chain, spec.Shape.MemoryMiB, vmmwire.MaxFiles-len(f.list))
	if err != nil {
		return nil, err
	}
	defer d.images.Trim(d.mapped) // after the release: it was built, or will be unmapped again
	defer p.close()
	msg.Memory = p.memory
	for i := range msg.Memory.Ranges {
		if r := &msg.Memory.Ranges[i]; r.File != vmmwire.NoFile {
			r.File += len(f.list)
		}
	}
	all := append(append([]*os.File(nil), f.list...), p.files...)
	if len(all) > vmmwire.MaxFiles {
		return nil, errdefs.WithHint(errdefs.New(errdefs.ErrResourceExhausted, "%d layers are %d files, a machine opens %d", len(chain), len(all), vmmwire.MaxFiles),
			"flatten the snapshot: forkd snapshot compact %s", last.ID)
	}
	return d.launch(ctx, spec, launchPlan{message: msg, files: all, overlays: []string{overlayName(0)}, mapped: p.base, forked: last.ID})
}

// restoreAhead restores a machine for the pool.
func (d *Driver) restoreAhead(ctx context.Context, spec engine.Spec, chain []engine.State) (engine.Machine, error) {
	m, err := d.restore(ctx, spec, chain)
	if err != nil {
		return nil, err // not a nil *Machine in an interface
	}
	return m, nil
}

// Prepare keeps n prepared machines of the last state of chain.
func (d *Driver) Prepare(chain []engine.State, n int, newSpec func() (engine.Spec, error)) {
	d.pool.Prepare(chain, n, newSpec)
}

// Claim hands out a prepared machine, or nil.
func (d *Driver) Claim(snapshotID string) engine.Machine { return d.pool.Claim(snapshotID) }

// Pooled counts the prepared machines of a snapshot.
func (d *Driver) Pooled(snapshotID string) int { return d.pool.Pooled(snapshotID) }

func wireShape(s engine.Shape) vmmwire.Shape {
	return vmmwire.Shape{CPUs: s.CPUs, MemoryMiB: s.MemoryMiB}
}

// devices adds the files of all devices of a machine. Their order is part of a snapshot.
func (f *files) devices(spec engine.Spec, chain []engine.State, overlay string) ([]vmmwire.Device, error) {
	console, err := os.OpenFile(filepath.Join(spec.Dir, consoleFile), os.O_WRONLY|os.O_CREATE|os.O_TRUNC|os.O_APPEND, 0o600)
	if err != nil {
		return nil, fmt.Errorf("open console log: %w", err)
	}
	serial := vmmwire.Device{Kind: vmmwire.DeviceSerial, Files: []int{f.add(console)}}
	agent, err := linux.ListenUnix(filepath.Join(spec.Dir, agentSocket))
	if err != nil {
		return nil, err
	}
	port := vmmwire.Device{Kind: vmmwire.DeviceConsole, Files: []int{f.add(agent)}}
	disk, err := f.block(spec, chain, overlay)
	if err != nil {
		return nil, err
	}
	return []vmmwire.Device{serial, port, disk, {Kind: vmmwire.DeviceRNG}}, nil
}

// kernelCmdline is for a boot under KVM. The clock is the TSC, whose rate is the host's: a
// calibration would need a PIT that the machine has not. THP and watchdogs are off because
// they dirty memory and burn CPU in every idle fork; the third line turns off bookkeeping that
// no sandbox is better for.
func kernelCmdline(tscKHz uint64) string {
	return fmt.Sprintf("console=ttyS0 loglevel=4 panic=-1 reboot=t tsc=reliable tsc_early_khz=%d "+
		"random.trust_cpu=on nowatchdog no_timer_check psi=0 cgroup_disable=memory audit=0 lsm= "+
		"noautogroup noirqdebug preempt=none transparent_hugepage=never cgroup_no_v1=all forkd.root=/dev/vda", tscKHz)
}

// launchPlan is what a machine is made of.
type launchPlan struct {
	message  vmmwire.Message // Boot or Restore
	files    []*os.File
	overlays []string // of the machine, topmost last
	mapped   string   // id of the snapshot whose memory file is mapped; "" for a boot
	forked   string   // id of the snapshot; "" for a boot
}

// launch makes a machine in a process of its own. On error nothing is left but files in spec.Dir.
func (d *Driver) launch(ctx context.Context, spec engine.Spec, plan launchPlan) (*Machine, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	p, err := d.process(spec)
	if err != nil {
		return nil, err
	}
	m := &Machine{d: d, dir: spec.Dir, cmd: p.cmd, proc: p.proc, done: make(chan struct{}), left: make(chan struct{}), op: newTurn()}
	m.rec = record{
		Version: recordVersion, ID: spec.ID, PID: p.id.PID, Start: p.id.Start, BootID: d.bootID, UID: p.uid, Token: p.token,
		Shape: spec.Shape, MappedID: plan.mapped, ForkedID: plan.forked, Overlays: plan.overlays,
	}
	d.track(m)
	err = d.limit(spec, p.id.PID)
	if err == nil {
		err = writeRecord(spec.Dir, m.rec)
	}
	if err == nil {
		err = m.command(ctx, plan.message, plan.files...)
	}
	if err != nil {
		err = sayWhy(err, spec.Dir)
		return nil, errors.Join(err, m.Kill(context.WithoutCancel(ctx)))
	}
	return m, nil
}

// process claims a blank process, or starts one.
func (d *Driver) process(spec engine.Spec) (*process, error) {
	if p := d.blanks.take(spec.Shape); p != nil {
		err := d.claim(p.token, spec.ID)
		if err == nil {
			err = p.move(spec.Dir)
		}
		if err == nil {
			return p, nil
		}
		d.endBlank(p)
		d.unclaim(p.token)
		d.cfg.Log("claim a prepared process for %s: %v", spec.ID, err)
	}
	return d.start(d.processName(spec.ID), spec.Dir, spec.Shape)
}

// processName is the name of the process of machine id.
func (d *Driver) processName(id string) string { return "forkd-" + d.cfg.Installation + "-" + id }
