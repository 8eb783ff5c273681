package sandbox

import (
	"context"
	"errors"
	"fmt"
	"time"

	"forkd.dev/forkd/internal/agentwire"
	"forkd.dev/forkd/internal/buildnet"
	"forkd.dev/forkd/internal/engine"
	"forkd.dev/forkd/internal/errdefs"
	"forkd.dev/forkd/internal/ident"
	"forkd.dev/forkd/internal/store/metadata"
	"forkd.dev/forkd/internal/store/snapshot"
)

// bootTimeout is how long a machine may take from its start to an agent that
// answers. A Debian guest under TCG on two cores needs 3 to 10 s.
const bootTimeout = 3 * time.Minute

// defaultBuildExec bounds each command of a snapshot build. Under TCG packages
// install many times slower than elsewhere.
const defaultBuildExec = 30 * time.Minute

// Defaults and bounds of a machine's shape.
const (
	defaultCPUs      = 1
	maxCPUs          = 8
	defaultMemoryMiB = 512
	minMemoryMiB     = 128
	maxMemoryMiB     = 256 << 10
	maxDiskMiB       = 1 << 20
)

// CreateSnapshot boots an image or forks a snapshot, does in it what req says and
// captures it. The builder machine ends with it, whatever happens.
func (s *Service) CreateSnapshot(ctx context.Context, req CreateSnapshot, progress Progress) (Snapshot, error) {
	if progress == nil {
		progress = func(string, float64) {}
	}
	ctx, done, err := s.begin(ctx)
	if err != nil {
		return Snapshot{}, err
	}
	defer done()
	if err := s.checkCreate(ctx, &req); err != nil {
		return Snapshot{}, err
	}
	files, err := s.spool(ctx, req.Files)
	if err != nil {
		return Snapshot{}, err
	}
	defer files.close()
	b := &builder{s: s, req: req, progress: progress, files: files, id: ident.New(ident.Snapshot), machineID: ident.New(ident.Sandbox)}
	if b.log, err = s.logs.start(b.id, b.title()); err != nil {
		return Snapshot{}, err
	}
	b.progress, b.tell = b.log.follow(progress), progress
	if err := s.logs.finish(b.log, b.id, b.build(ctx)); err != nil {
		return Snapshot{}, fmt.Errorf("make snapshot %s: %w", b.title(), err)
	}
	return s.Snapshot(context.WithoutCancel(ctx), b.id)
}

func (s *Service) checkCreate(ctx context.Context, req *CreateSnapshot) error {
	if req.Image != "" && req.From != "" {
		return errdefs.New(errdefs.ErrInvalid, "a snapshot is made from an image or from a snapshot, not both")
	}
	if req.Image == "" && req.From == "" {
		req.From = PyBase
	}
	if err := checkLabels(req.Labels); err != nil {
		return err
	}
	if err := buildnet.CheckAllow(req.AllowHosts); err != nil {
		return err
	}
	if err := checkStart(req.Start); err != nil {
		return err
	}
	for i, c := range req.Exec {
		if c == "" {
			return errdefs.New(errdefs.ErrInvalid, "exec command %d is empty", i)
		}
	}
	if req.ExecTimeout < 0 || req.ExecTimeout > agentwire.MaxExecTimeout {
		return errdefs.New(errdefs.ErrInvalid, "exec time-out %v is not between 0 and %v", req.ExecTimeout, agentwire.MaxExecTimeout)
	}
	if req.ExecTimeout == 0 {
		req.ExecTimeout = defaultBuildExec
	}
	if err := checkSizes(req.Shape); err != nil {
		return err
	}
	if err := s.checkSpace("make a snapshot", 0); err != nil {
		return err
	}
	return s.checkNewTag(ctx, req.Tag, req.Replace)
}

func checkSizes(sh engine.Shape) error {
	switch {
	case sh.CPUs < 0 || sh.CPUs > maxCPUs:
		return errdefs.New(errdefs.ErrInvalid, "%d CPUs asked for, 1 to %d are possible", sh.CPUs, maxCPUs)
	case sh.MemoryMiB != 0 && (sh.MemoryMiB < minMemoryMiB || sh.MemoryMiB > maxMemoryMiB):
		return errdefs.New(errdefs.ErrInvalid, "%d MiB of memory asked for, %d to %d are possible", sh.MemoryMiB, minMemoryMiB, maxMemoryMiB)
	case sh.DiskMiB < 0 || sh.DiskMiB > maxDiskMiB:
		return errdefs.New(errdefs.ErrInvalid, "a disk of %d MiB asked for, at most %d are possible", sh.DiskMiB, maxDiskMiB)
	}
	return nil
}

// checkNewTag tells early whether tag can be given.
func (s *Service) checkNewTag(ctx context.Context, tag string, replace bool) error {
	if tag == "" {
		return nil
	}
	if err := ident.CheckTag(tag); err != nil {
		return err
	}
	if replace {
		return nil
	}
	taken, err := s.cfg.Journal.FindTag(ctx, tag, s.cfg.Engine.Name())
	switch {
	case errors.Is(err, errdefs.ErrNotFound):
		return nil
	case err != nil:
		return err
	case taken.Engine == s.cfg.Engine.Name():
		if row, err := s.cfg.Journal.GetSnapshot(ctx, taken.SnapshotID); err == nil && row.Status == string(SnapshotFailed) {
			return nil // what has failed gives its tag away
		}
		return errdefs.WithHint(errdefs.New(errdefs.ErrConflict, "tag %s is taken by snapshot %s", tag, taken.SnapshotID),
			"choose another, or move it with --replace")
	}
	return nil // another engine's does not hinder
}

// builder makes one snapshot.
type builder struct {
	s         *Service
	req       CreateSnapshot
	progress  Progress
	tell      Progress // progress that is not worth a line of the log
	log       *buildLog
	files     *spooled // what is copied in; nil if nothing is
	id        string
	machineID string

	parent  *plan  // nil for a root
	release func() // gives back what source took
	image   Image
	root    engine.Root
	shape   engine.Shape
	machine engine.Machine
	link    *link
	online  *buildNetwork // nil unless commands run that may use it
}

func (b *builder) title() string {
	if b.req.Tag != "" {
		return b.req.Tag
	}
	return b.id
}

// build journals the builder machine, runs the steps, and removes the machine.
func (b *builder) build(ctx context.Context) (err error) {
	if err := b.source(ctx); err != nil {
		return err
	}
	defer b.release()
	d := demand{what: "make a snapshot with", n: 1}
	if b.parent != nil {
		d.eachMiB = b.parent.reserveMiB(ctx)
	}
	room, err := b.s.admit(ctx, d)
	if err != nil {
		return err
	}
	defer room.release()
	info := Sandbox{
		ID: b.machineID, State: Creating, SnapshotID: b.id, Engine: b.s.cfg.Engine.Name(), Shape: b.shape,
		CreatedAt: time.Now(), Labels: map[string]string{"forkd.builds": b.id},
	}
	row, err := b.s.toRow(info)
	if err != nil {
		return err
	}
	if err := b.s.cfg.Journal.InsertSandboxes(ctx, []metadata.Sandbox{row}); err != nil {
		return err
	}
	defer func() {
		if b.link != nil {
			b.link.close()
		}
		left := errors.Join(b.s.discard(b.machineID), b.s.cfg.Journal.DeleteSandboxes(context.WithoutCancel(ctx), b.machineID))
		if err == nil && left != nil {
			b.s.cfg.Log("remove the builder of %s: %v", b.id, left) // the next start does
			return
		}
		err = errors.Join(err, left)
	}()
	if err := b.run(ctx); err != nil {
		return err
	}
	return b.capture(ctx)
}

// source decides what the snapshot is made from, and its shape.
func (b *builder) source(ctx context.Context) error {
	if b.req.From != "" {
		p, err := b.s.plan(ctx, Fork{Snapshot: b.req.From, Shape: b.req.Shape, WithSecrets: b.req.WithSecrets, Progress: b.progress})
		if err != nil {
			return err
		}
		b.parent, b.shape, b.root, b.release = p, p.manifest.Shape, p.root, p.release
		return nil
	}
	img, err := b.s.imageFor(ctx, b.req.Image, b.progress)
	if err != nil {
		return err
	}
	b.image = img
	b.shape = b.req.Shape
	if b.shape.CPUs == 0 {
		b.shape.CPUs = defaultCPUs
	}
	if b.shape.MemoryMiB == 0 {
		b.shape.MemoryMiB = defaultMemoryMiB
	}
	if b.shape.DiskMiB == 0 {
		b.shape.DiskMiB = img.DiskMiB
	}
	if b.shape.DiskMiB < img.DiskMiB {
		return errdefs.New(errdefs.ErrInvalid, "a disk of %d MiB asked for, but image %s has %d MiB", b.shape.DiskMiB, img.Name, img.DiskMiB)
	}
	if b.release, err = b.s.useImage(img.ID); err != nil {
		return err
	}
	if b.root, err = b.s.cfg.Images.Root(ctx, img.ID); err != nil {
		b.release()
	}
	return err
}

// run starts the builder machine and does in it what was asked for.
func (b *builder) run(ctx context.Context) error {
	spec, err := b.s.newSpec(b.machineID, b.shape, b.root, 0)
	if err != nil {
		return err
	}
	if b.parent == nil {
		err = b.boot(ctx, spec)
	} else {
		err = b.fork(ctx, spec)
	}
	if err != nil {
		return err
	}
	if err := b.copyFiles(ctx); err != nil {
		return err
	}
	if err := b.withNetwork(ctx, b.commands); err != nil {
		return err
	}
	return b.start(ctx)
}

func (b *builder) boot(ctx context.Context, spec engine.Spec) (err error) {
	b.progress("booting "+b.image.Name, -1)
	if b.machine, err = b.s.cfg.Engine.Boot(ctx, spec); err != nil {
		return err
	}
	b.link = newLink(b.machine, b.s.cfg.Connect, bootTimeout)
	cfg := agentwire.BootConfig{Hostname: "forkd", HostTime: time.Now(), Entropy: newIdentity("", "", nil).Entropy}
	err = b.call(ctx, bootTimeout, func(ctx context.Context, a Agent) error {
		cfg.HostTime = time.Now()
		return a.Boot(ctx, cfg)
	})
	if err != nil {
		return fmt.Errorf("boot image %s: %w%s", b.image.Name, err, b.console())
	}
	return nil
}

// fork makes the builder a child of the parent snapshot, identity and all.
func (b *builder) fork(ctx context.Context, spec engine.Spec) (err error) {
	b.progress("forking "+b.parent.name(), -1)
	if b.machine, err = b.s.cfg.Engine.Restore(ctx, spec, b.parent.chain); err != nil {
		return err
	}
	b.link = newLink(b.machine, b.s.cfg.Connect, helloTimeout)
	if err := b.machine.Resume(ctx); err != nil {
		return err
	}
	return b.call(ctx, helloTimeout, func(ctx context.Context, a Agent) error {
		_, err := a.VerdictFork(ctx, newIdentity(b.machineID, "forkd", nil))
		return err
	})
}

// warm starts the Python runner where there is a Python, and runs the warm code.
// A failure counts only if warm code was asked for.
func (b *builder) warm(ctx context.Context) error {
	if b.req.Warm == "" && b.parent != nil {
		return nil
	}
	err := b.ticking("warming python", func() error { return b.warmStart(ctx, b.req.Warm) })
	if err != nil && b.req.Warm == "" && errors.Is(err, errdefs.ErrUnsupported) {
		return nil
	}
	return err
}

// warmStart starts the Python runner and runs code in it.
func (b *builder) warmStart(ctx context.Context, code string) error {
	var res agentwire.EvalResult
	err := b.call(ctx, b.req.ExecTimeout, func(ctx context.Context, a Agent) (err error) {
		res, err = a.WarmStart(ctx, "python", code)
		return err
	})
	if err != nil {
		return fmt.Errorf("warm python: %w", err)
	}
	b.log.output(res.Stdout)
	b.log.output(res.Stderr)
	if res.Error != "" {
		return errdefs.New(errdefs.ErrInvalid, "warm code failed: %s\n%s", res.Error, res.Traceback)
	}
	return nil
}

func (b *builder) exec(ctx context.Context, command string) error {
	b.log.step("$ %s", command)
	var res agentwire.ExecResult
	req := agentwire.ExecRequest{Argv: []string{"/bin/sh", "-c", command}, Timeout: b.req.ExecTimeout, Env: b.buildEnv()}
	err := b.call(ctx, b.req.ExecTimeout+callSlack, func(ctx context.Context, a Agent) (err error) {
		res, err = a.Exec(ctx, req)
		return err
	})
	b.log.output(res.Stdout)
	b.log.output(res.Stderr)
	switch {
	case err != nil:
		return fmt.Errorf("command %q: %w", command, err)
	case res.TimedOut:
		return errdefs.New(errdefs.ErrTimeout, "command %q did not end within %v", command, b.req.ExecTimeout)
	case res.ExitCode != 0:
		return errdefs.New(errdefs.ErrInvalid, "command %q ended with exit code %d", command, res.ExitCode)
	}
	return nil
}

// tailBytes is how much of the console goes into an error.
const tailBytes = 2000

func (b *builder) call(ctx context.Context, timeout time.Duration, fn func(context.Context, Agent) error) error {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	err := b.link.call(ctx, func(a Agent) error { return fn(ctx, a) })
	if err == nil {
		return nil
	}
	patience := time.Duration(0)
	if errors.Is(err, errdefs.ErrUnavailable) || errors.Is(err, errdefs.ErrGuest) {
		patience = endPatience
	}
	wait, stop := context.WithTimeout(context.Background(), patience)
	defer stop()
	select {
	case <-b.machine.Done():
		return errdefs.New(errdefs.ErrGuest, "the machine ended: %s", b.machine.Reason())
	case <-wait.Done():
		return err
	}
}

// endPatience is how long after its connection a machine that has died may take
// to be known as dead.
const endPatience = 2 * time.Second

// console returns the last lines of the guest's console for an error text.
func (b *builder) console() string {
	r, err := b.machine.Console()
	if err != nil {
		return ""
	}
	defer r.Close()
	buf := make([]byte, 64<<10)
	n, _ := r.Read(buf)
	return "\nconsole:\n" + string(buf[max(0, n-tailBytes):n])
}

// capture stores the builder machine and publishes the snapshot once a child of it
// was loaded.
func (b *builder) capture(ctx context.Context) error {
	b.progress("capturing", -1)
	var pong agentwire.Pong
	err := b.call(ctx, callSlack, func(ctx context.Context, a Agent) (err error) {
		if pong, err = a.Ping(ctx); err != nil {
			return err
		}
		if err := a.Prepare(ctx, agentwire.Prepare{Sync: true, Settle: true}); err != nil {
			return err
		}
		if err := b.settle(ctx); err != nil {
			return err
		}
		return a.Commit(ctx)
	})
	if err != nil {
		return fmt.Errorf("prepare the guest: %w", err)
	}
	// The link stays open: a fork is connected before its state is loaded, and with
	// the port open on both sides its guest has nothing to handle for that.
	staging, err := b.s.cfg.Store.Stage(b.id)
	if err != nil {
		return err
	}
	if err := b.publish(ctx, staging, pong); err != nil {
		return errors.Join(err, staging.Discard())
	}
	return nil
}

// settleGuest is how long a guest's kernel has housekeeping left after its processes
// were frozen: delayed work, grace periods, timers of some seconds.
const settleGuest = 7 * time.Second

// settle lets that end before the capture of a built-in, or every fork of it would
// do it, on memory of its own. Nothing tells when it has ended.
func (b *builder) settle(ctx context.Context) error {
	if b.req.Labels[builtinLabel] == "" {
		return nil
	}
	b.progress("waiting for the guest to settle", -1)
	timer := time.NewTimer(b.s.cfg.Settle)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (b *builder) publish(ctx context.Context, staging *snapshot.Staging, pong agentwire.Pong) error {
	spec := engine.CaptureSpec{Dir: staging.Dir(), After: engine.AfterEnd}
	if b.parent != nil {
		spec.Parent = b.parent.chain
	}
	res, err := b.machine.Capture(ctx, spec)
	if err != nil {
		return err
	}
	m, err := b.manifest(res, pong)
	if err != nil {
		return err
	}
	b.progress("writing", -1)
	row := metadata.Snapshot{ID: b.id, Status: string(SnapshotBuilding), Engine: b.s.cfg.Engine.Name(), CreatedAt: m.CreatedAt}
	if err := b.s.cfg.Journal.PutSnapshot(ctx, row); err != nil {
		return err
	}
	if _, err := staging.Publish(ctx, m); err != nil {
		return errors.Join(err, b.s.cfg.Journal.DeleteSnapshot(context.WithoutCancel(ctx), b.id))
	}
	b.progress("checking that it restores", -1)
	if err := b.finish(ctx, row); err != nil {
		return errors.Join(err, b.s.removeSnapshot(context.WithoutCancel(ctx), b.id))
	}
	return nil
}

// finish loads the state once into a stopped child and makes the snapshot ready.
func (b *builder) finish(ctx context.Context, row metadata.Snapshot) error {
	if err := b.s.tryRestore(ctx, b.id, b.shape, b.root); err != nil {
		return fmt.Errorf("the snapshot does not restore: %w", err)
	}
	policy := metadata.KeepTag
	if b.req.Replace {
		policy = metadata.MoveTag
	}
	row.Status = string(SnapshotReady)
	return b.s.cfg.Journal.PublishSnapshot(ctx, row, b.req.Tag, policy)
}

// tryRestore loads snapshot id into a machine that never runs.
func (s *Service) tryRestore(ctx context.Context, id string, shape engine.Shape, root engine.Root) error {
	m, err := s.prove(ctx, id, stopped{shape: shape, root: root})
	if err != nil {
		return err
	}
	return errors.Join(m.Kill(context.WithoutCancel(ctx)), s.discard(m.ID()))
}

// prove loads snapshot id into a machine and returns it; it belongs to the caller.
func (s *Service) prove(ctx context.Context, id string, w stopped) (engine.Machine, error) {
	chain, err := s.cfg.Store.States(id)
	if err != nil {
		return nil, err
	}
	w.chain = chain
	return s.restoreStopped(ctx, w)
}
