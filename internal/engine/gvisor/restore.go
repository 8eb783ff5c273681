package gvisor

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"forkd.dev/forkd/internal/engine"
	"forkd.dev/forkd/internal/errdefs"
	"forkd.dev/forkd/internal/linux"
)

// Boot starts a machine from its root file system.
func (d *Driver) Boot(ctx context.Context, spec engine.Spec) (engine.Machine, error) {
	m, err := d.launch(ctx, spec, launchPlan{command: []string{"run", "-detach"}, agent: d.agent})
	if err != nil {
		return nil, fmt.Errorf("boot %s: %w", spec.ID, err)
	}
	return m, nil
}

// Restore makes a machine from the last state of chain. All of it but its agent is
// held by that agent until a verdict comes, so it need not be stopped.
func (d *Driver) Restore(ctx context.Context, spec engine.Spec, chain []engine.State) (engine.Machine, error) {
	if len(chain) == 0 {
		return nil, errdefs.New(errdefs.ErrInvalid, "restore %s: no state given", spec.ID)
	}
	d.pool.Busy(1)
	defer d.pool.Busy(-1)
	last := chain[len(chain)-1]
	agent, err := d.prepare(spec, chain)
	if err == nil {
		var m *Machine
		m, err = d.launch(ctx, spec, launchPlan{
			command: []string{"restore", "-detach", "-image-path", last.Dir}, agent: agent, forked: last.ID,
		})
		if err == nil {
			return m, nil
		}
	}
	return nil, fmt.Errorf("restore %s from %s: %w", spec.ID, last.ID, restoreError(err))
}

// restoreError gives a runsc that could not load a state its class: the files were
// checked before, so what is wrong is in them.
func restoreError(err error) error {
	var failed *runscError
	if errors.As(err, &failed) && failed.command == "restore" && errdefs.Class(err) == errdefs.ErrInternal {
		return errdefs.As(errdefs.ErrCorrupt, err)
	}
	return err
}

// prepare checks the last state of chain and returns the path of its agent.
func (d *Driver) prepare(spec engine.Spec, chain []engine.State) (agent string, err error) {
	last := chain[len(chain)-1]
	desc, err := readDescription(last)
	if err != nil {
		return "", err
	}
	if desc.Tree != spec.Root.TreeDigest {
		return "", errdefs.WithHint(errdefs.New(errdefs.ErrIncompatible, "state %s belongs to a root file system with digest %.20s, this one has %.20s", last.ID, desc.Tree, spec.Root.TreeDigest),
			"make the snapshot again")
	}
	return d.findAgent(chain, desc.Agent)
}

// launchPlan is how a sandbox comes to be.
type launchPlan struct {
	command []string // of runsc, up to -bundle and the id
	agent   string   // path on the host
	forked  string   // snapshot id, "" after a boot
	load    *engine.State
}

// launch makes the sandbox of a machine. On error nothing is left but files in
// spec.Dir.
func (d *Driver) launch(ctx context.Context, spec engine.Spec, plan launchPlan) (*Machine, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	m, err := d.start(ctx, spec, plan)
	if err != nil {
		if errors.As(err, new(*runscError)) && d.limits.oomKilled(spec.ID) {
			err = errdefs.New(errdefs.ErrResourceExhausted, "its memory limit is too small for it: %w", err)
		}
		return nil, errors.Join(err, d.Reap(context.WithoutCancel(ctx), spec.ID, spec.Dir))
	}
	d.track(m)
	return m, nil
}

func (d *Driver) start(ctx context.Context, spec engine.Spec, plan launchPlan) (*Machine, error) {
	stdio, err := makePipes(spec.Dir)
	if err != nil {
		return nil, err
	}
	defer closeAll(stdio)
	home := filepath.Dir(filepath.Dir(plan.agent))
	b := bundle{dir: spec.Dir, stage: cmp.Or(d.stage, home), root: spec.Root, shape: spec.Shape}
	if d.isRoot {
		b.uid = d.pickUID()
	}
	if err := b.write(); err != nil {
		return nil, err
	}
	enter, err := d.limits.make(spec)
	if err != nil {
		return nil, err
	}
	args := append(plan.command[:len(plan.command):len(plan.command)], "-bundle", filepath.Join(spec.Dir, bundleDir), spec.ID)
	if err := d.run(ctx, call{args: args, stdio: stdio, enter: enter, home: home}); err != nil {
		var failed *runscError
		if errors.As(err, &failed) {
			failed.said = lastLine(drain(stdio[2]))
		}
		return nil, err
	}
	m := &Machine{
		d: d, dir: spec.Dir, console: &console{dir: spec.Dir}, op: newTurn(), load: plan.load,
		done: make(chan struct{}), left: make(chan struct{}),
	}
	m.rec = record{
		Version: recordVersion, ID: spec.ID, BootID: d.bootID, UID: b.uid, Shape: spec.Shape,
		Tree: spec.Root.TreeDigest, Agent: plan.agent, Forked: plan.forked,
	}
	if err := m.identify(); err != nil {
		return nil, err
	}
	return m, writeRecord(spec.Dir, m.rec)
}

// identify finds the processes of a machine that was just made, in runsc's record.
func (m *Machine) identify() error {
	path := filepath.Join(m.d.runDir, m.rec.ID+"_sandbox:"+m.rec.ID+".state")
	b, err := os.ReadFile(path)
	if err != nil {
		return fmt.Errorf("read record of runsc: %w", err)
	}
	var state struct {
		GoferPID int `json:"goferPid"`
		Sandbox  struct {
			PID int `json:"pid"`
		} `json:"sandbox"`
	}
	if err := json.Unmarshal(b, &state); err != nil {
		return fmt.Errorf("read record of runsc: %w", err)
	}
	sentry, err := linux.Identify(state.Sandbox.PID)
	if err != nil {
		return errdefs.New(errdefs.ErrGuest, "the sandbox ended at once: %w", err)
	}
	gofer, err := linux.Identify(state.GoferPID)
	if err != nil {
		return errdefs.New(errdefs.ErrGuest, "the sandbox ended at once: %w", err)
	}
	m.rec.PID, m.rec.Start = sentry.PID, sentry.Start
	m.rec.GoferPID, m.rec.GoferAt = gofer.PID, gofer.Start
	return m.open()
}

// open opens handles of the processes in the record.
func (m *Machine) open() (err error) {
	if m.proc, err = (linux.Process{PID: m.rec.PID, Start: m.rec.Start}).Open(); err != nil {
		return err
	}
	if m.gofer, err = (linux.Process{PID: m.rec.GoferPID, Start: m.rec.GoferAt}).Open(); err != nil {
		return errors.Join(err, m.proc.Close())
	}
	return nil
}

// fill restores a state into a prepared machine.
func (m *Machine) fill(ctx context.Context, s engine.State) error {
	err := m.d.run(ctx, call{args: []string{"restore", "-detach", "-image-path", s.Dir, m.rec.ID}})
	return restoreError(err)
}

// Adopt takes over a running machine of an earlier daemon.
func (d *Driver) Adopt(_ context.Context, id, dir string) (engine.Machine, error) {
	rec, err := readRecord(dir)
	if err != nil {
		return nil, fmt.Errorf("adopt %s: %w", id, err)
	}
	if rec.ID != id || rec.BootID != d.bootID {
		return nil, errdefs.New(errdefs.ErrNotFound, "adopt %s: its record is of another boot or machine", id)
	}
	m := &Machine{
		d: d, rec: rec, dir: dir, console: &console{dir: dir}, op: newTurn(),
		done: make(chan struct{}), left: make(chan struct{}),
	}
	if !(linux.Process{PID: rec.PID, Start: rec.Start}).Alive() {
		return nil, errdefs.New(errdefs.ErrNotFound, "adopt %s: its user-space kernel has ended", id)
	}
	if err := m.open(); err != nil {
		return nil, fmt.Errorf("adopt %s: %w", id, err)
	}
	m.paused = stopped(rec.PID)
	d.track(m)
	return m, nil
}
