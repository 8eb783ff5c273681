package sandbox

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"time"

	"forkd.dev/forkd/internal/agentwire"
	"forkd.dev/forkd/internal/engine"
	"forkd.dev/forkd/internal/errdefs"
	"forkd.dev/forkd/internal/ident"
	"forkd.dev/forkd/internal/store/metadata"
	"forkd.dev/forkd/internal/store/snapshot"
)

// Mode says how a running sandbox is captured.
type Mode string

// The modes of a branch. All of them stop the guest only while its state is
// copied; what is stored is written after it goes on.
const (
	ModeLive Mode = "live" // only what differs from the parent, written in the background
	ModeDiff Mode = "diff" // the same, by the name other systems give it
	ModeFull Mode = "full" // complete: the snapshot has no parent
)

// Labels of snapshots of running sandboxes.
const (
	labelBranchedFrom = "forkd.branched-from" // sandbox id
	labelCheckpointOf = "forkd.checkpoint-of" // sandbox id
	labelText         = "forkd.label"         // what the user calls a checkpoint
	labelAnonymous    = "forkd.anonymous"     // it goes with its last user
	labelAutoTag      = "forkd.auto-tag"      // the tag that was made up for it
	labelExpires      = "forkd.expires"       // when it goes, unless it has another tag by then
)

// Branch asks for a snapshot of a running sandbox, which goes on.
type Branch struct {
	Tag     string // "" makes one up
	Replace bool
	Labels  map[string]string
	Mode    Mode // "" takes the best the engine has
	// NoWait returns as soon as the sandbox runs again; the snapshot is "writing"
	// until it is ready or failed.
	NoWait bool
	// NoFreeze leaves user processes running around the capture. They then run in a
	// fork until it has its identity, which its receipt says.
	NoFreeze bool
	// Sync writes the guest's file systems out before the capture.
	Sync bool
	// WithSecrets agrees to give a tag to a memory that holds secrets.
	WithSecrets bool
	// From, if set, must be the snapshot that the sandbox was forked from.
	From string
}

// Branched is the outcome of a capture of a running sandbox.
type Branched struct {
	Snapshot    Snapshot
	SourceID    string
	Pause       time.Duration // the machine was stopped
	Stall       time.Duration // user processes were frozen or the machine stopped
	CopiedBytes int64
	LayerBytes  int64 // 0 while it is being written
}

// Branch captures a running sandbox into a new snapshot.
func (s *Service) Branch(ctx context.Context, ref string, b Branch) (Branched, error) {
	e, err := s.resolve(ref)
	if err != nil {
		return Branched{}, err
	}
	if err := s.checkBranch(ctx, &b, e.snapshot()); err != nil {
		return Branched{}, err
	}
	return s.captureRunning(ctx, e, taking{
		id: ident.New(ident.Snapshot), tag: b.Tag, replace: b.Replace, labels: b.Labels, mode: b.Mode,
		wait: !b.NoWait, freeze: !b.NoFreeze, sync: b.Sync, kind: labelBranchedFrom,
	})
}

func (s *Service) checkBranch(ctx context.Context, b *Branch, source Sandbox) error {
	switch b.Mode {
	case "":
		b.Mode = ModeLive
	case ModeLive, ModeDiff, ModeFull:
	default:
		return errdefs.New(errdefs.ErrInvalid, "mode %.40q is not full, diff or live", b.Mode)
	}
	if err := checkLabels(b.Labels); err != nil {
		return err
	}
	if err := checkSecrets("sandbox "+source.ID, source.HoldsSecrets && b.Tag != "", b.WithSecrets); err != nil {
		return err
	}
	if b.From != "" {
		id, _, err := s.resolveSnapshot(ctx, b.From)
		if err != nil && !errors.Is(err, errdefs.ErrNotFound) {
			return err
		}
		if err != nil || id != source.SnapshotID {
			return errdefs.New(errdefs.ErrInvalid, "sandbox %s was not forked from %s, but from snapshot %s", source.ID, b.From, source.SnapshotID)
		}
	}
	if b.Tag == "" {
		now := time.Now()
		b.Tag = "branch-" + source.ID[:10] + "-" + strconv.FormatInt(now.UnixMicro(), 36)
		b.Labels = withLabels(b.Labels, map[string]string{
			labelAutoTag: b.Tag, labelExpires: now.Add(autoTagLife).UTC().Format(time.RFC3339),
		})
	}
	return s.checkNewTag(ctx, b.Tag, b.Replace)
}

// taking is one capture of a running sandbox under way.
type taking struct {
	id      string
	tag     string // "" for none
	replace bool
	labels  map[string]string
	mode    Mode
	wait    bool
	freeze  bool
	sync    bool
	kind    string // label that names the source
	// alone: the next capture is no difference to this one, which can go before it.
	alone bool

	// Set on the way.
	s       *Service
	e       *entry
	source  Sandbox
	parent  *plan // kept until all is stored
	staging *snapshot.Staging
	pong    agentwire.Pong
	result  engine.CaptureResult
	frozen  time.Time // when the guest was asked to freeze
	thawed  bool
	stall   time.Duration
	keep    func() bool   // from now on the end of the caller ends nothing
	running chan struct{} // closed when the source runs again and all of it is taken
	early   Branched      // what is known by then
	ended   chan error    // receives the outcome
}

// captureRunning captures e. One capture or rollback runs for a sandbox at a time;
// exec and eval go on, but for the stall.
func (s *Service) captureRunning(ctx context.Context, e *entry, t taking) (Branched, error) {
	t.s, t.e = s, e
	if err := s.checkSpace("capture a sandbox", 0); err != nil {
		return Branched{}, err
	}
	if err := standsStill(e); err != nil {
		return Branched{}, err
	}
	ctx, done, err := s.begin(ctx)
	if err != nil {
		return Branched{}, err
	}
	err = e.thawed(ctx)
	if err == nil {
		err = e.enter(Capturing)
	}
	if err != nil {
		done()
		return Branched{}, err
	}
	t.source = e.snapshot()
	t.running, t.ended = make(chan struct{}), make(chan error, 1)
	s.group.Go(func() {
		err := t.all(ctx)
		e.leave(Capturing)
		done()
		if t.parent != nil {
			t.parent.release()
		}
		if t.kind == labelCheckpointOf {
			s.collect(t.id) // its sandbox may have been ended meanwhile
		}
		t.ended <- err
		if err != nil && t.told() {
			s.cfg.Log("%v", err)
		}
	})
	if t.wait {
		if err := <-t.ended; err != nil {
			return Branched{}, err
		}
		return t.outcome(ctx)
	}
	select {
	case <-t.running:
		return t.early, nil
	case err := <-t.ended:
		if t.told() { // both at once
			return t.early, nil
		}
		if err != nil {
			return Branched{}, err
		}
		return t.outcome(ctx)
	}
}

// all captures and stores. Until the source runs again the end of ctx ends it; what
// is taken then is kept, even if the caller does not wait for it.
func (t *taking) all(ctx context.Context) error {
	work, cancel := context.WithCancel(context.WithoutCancel(ctx))
	defer cancel()
	t.keep = context.AfterFunc(ctx, cancel)
	defer t.keep()
	if err := t.take(work); err != nil {
		if endedMeanwhile(work, t.e, err) {
			return errdefs.New(errdefs.ErrGuest, "sandbox %s ended while it was captured: %s", t.source.ID, t.e.whyEnded())
		}
		if ctx.Err() != nil && work.Err() != nil {
			err = errors.Join(ctx.Err(), err)
		}
		return fmt.Errorf("capture sandbox %s: %w", t.source.ID, err)
	}
	if err := t.store(work); err != nil {
		return fmt.Errorf("store the capture of sandbox %s: %w", t.source.ID, err)
	}
	return nil
}

// told tells whether the caller knows of the snapshot by now.
func (t *taking) told() bool {
	select {
	case <-t.running:
		return !t.wait
	default:
		return false
	}
}

// enter puts a running sandbox into a state in which nothing else of its kind may
// be done to it.
func (e *entry) enter(state State) error {
	var err error
	e.update(func(sb *Sandbox) {
		switch sb.State {
		case Running:
			sb.State = state
		case Failed, Lost:
			err = errdefs.New(errdefs.ErrConflict, "sandbox %s has ended: %s", sb.ID, sb.Reason)
		default:
			err = errdefs.New(errdefs.ErrConflict, "sandbox %s is %s: one capture or rollback at a time", sb.ID, sb.State)
		}
	})
	return err
}

// leave ends what enter began, unless the sandbox ended meanwhile.
func (e *entry) leave(state State) {
	e.update(func(sb *Sandbox) {
		if sb.State == state {
			sb.State = Running
		}
	})
}

// take reserves the snapshot's row and tag, and captures. On error nothing is left
// and the source goes on.
func (t *taking) take(ctx context.Context) (err error) {
	if t.parent, err = t.parentPlan(ctx); err != nil {
		return err
	}
	row := metadata.Snapshot{ID: t.id, Status: string(SnapshotWriting), Engine: t.s.cfg.Engine.Name(), CreatedAt: time.Now()}
	if err := t.s.cfg.Journal.PublishSnapshot(ctx, row, t.tag, tagPolicy(t.replace)); err != nil {
		return err
	}
	if t.staging, err = t.s.cfg.Store.Stage(t.id); err == nil {
		err = t.capture(ctx)
	}
	if err == nil {
		return nil
	}
	return t.giveUp(err)
}

// giveUp removes what was begun of the snapshot. If the caller knows of it already,
// it stays listed as failed.
func (t *taking) giveUp(err error) error {
	if !t.told() {
		return errors.Join(err, t.drop())
	}
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	row := metadata.Snapshot{ID: t.id, Status: string(SnapshotFailed), Engine: t.s.cfg.Engine.Name(), Reason: err.Error(), CreatedAt: time.Now()}
	return errors.Join(err, t.staging.Discard(), t.s.cfg.Journal.PutSnapshot(ctx, row))
}

// parentPlan is of the snapshot that the capture is a difference to. One of a machine
// that was booted from a disk is complete by itself.
func (t *taking) parentPlan(ctx context.Context) (*plan, error) {
	if id := t.e.machine.Parent(); id != "" {
		return t.s.planOf(ctx, id)
	}
	p, err := t.s.planCold(ctx, t.source.base())
	if err == nil {
		p.id, p.chain = "", nil
	}
	return p, err
}

func tagPolicy(replace bool) metadata.TagPolicy {
	if replace {
		return metadata.MoveTag
	}
	return metadata.KeepTag
}

// drop removes what was begun of the snapshot.
func (t *taking) drop() error {
	var err error
	if t.staging != nil {
		err = t.staging.Discard()
	}
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	return errors.Join(err, t.s.cfg.Journal.DeleteSnapshot(ctx, t.id))
}

// capture freezes, captures and thaws.
func (t *taking) capture(ctx context.Context) error {
	agent, err := t.e.link.get(ctx)
	if err != nil {
		return err
	}
	if t.pong, err = agent.Ping(ctx); err != nil {
		return err
	}
	if t.sync && !t.freeze { // an agent that is to freeze writes out before it does, and once more after
		sync := agentwire.ExecRequest{Argv: []string{"/bin/sync"}, Timeout: time.Minute}
		if _, err := agent.Exec(ctx, sync); err != nil && !errors.Is(err, errdefs.ErrNotFound) {
			return fmt.Errorf("write file systems out: %w", err)
		}
	}
	spec := engine.CaptureSpec{
		Dir: t.staging.Dir(), Parent: t.parent.chain, After: engine.AfterResume,
		Resumed: func(ctx context.Context, res engine.CaptureResult) error { return t.resumed(ctx, agent, res) },
	}
	if !t.freeze {
		t.result, err = t.e.machine.Capture(ctx, spec)
		return err
	}
	// The journal knows first that the guest will wait for a verdict.
	if err := t.owe(ctx, verdictSource); err != nil {
		t.e.update(func(sb *Sandbox) { sb.owed = "" }) // it was not frozen
		return err
	}
	spec.BeforeStop = func(ctx context.Context) error { return t.freezeGuest(ctx, agent) }
	t.result, err = t.e.machine.Capture(ctx, spec)
	if !t.thawed {
		err = errors.Join(err, t.thaw(agent))
	}
	return err
}

// resumed thaws the source, which runs again, and tells the caller.
func (t *taking) resumed(ctx context.Context, agent Agent, res engine.CaptureResult) (err error) {
	t.keep()
	t.result, t.stall = res, res.Pause
	if t.freeze {
		if err := t.thaw(agent); err != nil {
			return err
		}
	}
	if !t.wait {
		if t.early, err = t.outcome(ctx); err != nil {
			return err
		}
	}
	close(t.running)
	return nil
}

// freezeGuest has the agent freeze user processes and wait for a verdict.
func (t *taking) freezeGuest(ctx context.Context, agent Agent) error {
	t.frozen = time.Now()
	err := agent.Prepare(ctx, agentwire.Prepare{Sync: t.sync})
	if err == nil {
		err = agent.Commit(ctx)
	}
	if err != nil {
		return fmt.Errorf("freeze the guest: %w", err)
	}
	return nil
}

// thaw tells the source that it is the source. The stall is what the host saw from
// the request to freeze until the agent has answered that.
func (t *taking) thaw(agent Agent) error {
	t.thawed = true
	ctx, cancel := context.WithTimeout(context.Background(), callSlack)
	defer cancel()
	if !t.frozen.IsZero() {
		err := agent.VerdictSource(ctx)
		if err != nil && !errors.Is(err, errdefs.ErrConflict) { // a conflict: it was not frozen, or not any more
			t.s.group.Go(func() { t.s.goOn(t.e) }) // no guest stays frozen because of one call
			return fmt.Errorf("thaw the source: %w", err)
		}
		t.stall = time.Since(t.frozen)
	}
	return t.owe(ctx, "")
}

// verdictSource is what a journal row owes while its guest is frozen by a capture.
const verdictSource = "source"

func (t *taking) owe(ctx context.Context, verdict string) error {
	return t.s.journal(ctx, t.e.update(func(sb *Sandbox) { sb.owed = verdict }))
}

// store publishes what was captured and proves that it restores.
func (t *taking) store(ctx context.Context) error {
	if err := t.publish(ctx); err != nil {
		return t.giveUp(err)
	}
	return nil
}

func (t *taking) publish(ctx context.Context) error {
	m, err := t.manifest(ctx)
	if err != nil {
		return err
	}
	if t.mode != ModeFull {
		t.shorten(ctx, &m)
	} else if err := t.flatten(ctx, &m); err != nil {
		return err
	}
	if _, err := t.staging.Publish(ctx, m); err != nil {
		return err
	}
	if err := t.prove(ctx, m); err != nil {
		t.s.cfg.Engine.Forget(t.id)
		return errors.Join(err, t.s.cfg.Store.Remove(ctx, t.id))
	}
	if t.kind == labelCheckpointOf {
		t.s.reprieve(ctx, t.e)
	}
	return nil
}

// prove makes what is published ready, once it was restored.
func (t *taking) prove(ctx context.Context, m snapshot.Manifest) error {
	if !t.alone {
		if err := t.e.machine.Stored(ctx, t.id); err != nil && t.e.alive() {
			return err
		}
	}
	proof, err := t.s.prove(ctx, t.id, stopped{shape: m.Shape, root: t.parent.root, limits: limitsOf(t.source)})
	if err != nil {
		return fmt.Errorf("the snapshot does not restore: %w", err)
	}
	t.count(ctx)
	row := metadata.Snapshot{ID: t.id, Status: string(SnapshotReady), Engine: m.Compat.Engine, CreatedAt: m.CreatedAt}
	err = t.s.cfg.Journal.PublishSnapshot(ctx, row, "", metadata.KeepTag)
	if err == nil && t.kind == labelCheckpointOf && t.s.wantsSpare(t.e) {
		t.s.keepSpare(t.e, t.id, proof, m.Agent.RunnerQuiet)
		return nil
	}
	return errors.Join(err, t.s.discard(proof.ID()))
}

// count notes the branch in the source, if that still lives.
func (t *taking) count(ctx context.Context) {
	if t.kind != labelBranchedFrom || !t.e.alive() {
		return
	}
	info := t.e.update(func(sb *Sandbox) { sb.BranchCount++ })
	if err := t.s.journal(ctx, info); err != nil {
		t.s.cfg.Log("count a branch of %s: %v", info.ID, err)
	}
}

func (t *taking) manifest(context.Context) (snapshot.Manifest, error) {
	labels := withLabels(map[string]string{t.kind: t.source.ID}, t.labels)
	if t.parent.id == "" {
		labels[labelMadeFrom] = t.source.base()
	}
	compat, err := t.s.cfg.Engine.Compat(t.parent.root)
	if err != nil {
		return snapshot.Manifest{}, err
	}
	m := snapshot.Manifest{
		ID: t.id, ParentID: t.parent.id, CreatedAt: time.Now().UTC(),
		Image: t.parent.manifest.Image, Compat: compat, Isolation: t.parent.manifest.Isolation,
		Shape: t.parent.manifest.Shape, Labels: labels,
		Recipe: snapshot.Recipe{From: t.source.ID},
		Agent: snapshot.Agent{
			Protocol: t.pong.ProtocolVersion, WarmLanguages: t.pong.Runners,
			RunnerQuiet: t.freeze && t.pong.Threads == 0 && t.pong.Children == 0 && !t.s.runsProgram(t.parent.id),
		},
		HoldsSecrets: t.source.HoldsSecrets || t.parent.manifest.HoldsSecrets,
		Disk:         snapshot.DiskJournal,
		PauseMs:      float64(t.result.Pause.Microseconds()) / 1000,
	}
	if t.sync {
		m.Disk = snapshot.DiskSynced
	}
	for _, a := range t.result.Artifacts {
		m.Artifacts = append(m.Artifacts, snapshot.Artifact{Artifact: a})
	}
	return m, nil
}

// flatten makes the captured state complete, so that it needs no parent.
func (t *taking) flatten(ctx context.Context, m *snapshot.Manifest) error {
	c, ok := t.s.cfg.Engine.(engine.Compactor)
	if !ok {
		return errdefs.New(errdefs.ErrUnsupported, "engine %s cannot make a full snapshot of a running sandbox", t.s.cfg.Engine.Name())
	}
	artifacts, err := c.Compact(ctx, engine.Compaction{Chain: t.layered(), Dir: t.staging.Dir()})
	if err != nil {
		return err
	}
	m.ParentID = ""
	t.exchange(m, artifacts)
	return nil
}

// outcome describes the snapshot as it is now.
func (t *taking) outcome(ctx context.Context) (Branched, error) {
	out := Branched{
		SourceID: t.source.ID, Pause: t.result.Pause, Stall: t.stall,
		CopiedBytes: t.result.CopiedBytes, LayerBytes: t.result.LayerBytes,
	}
	var err error
	out.Snapshot, err = t.s.Snapshot(context.WithoutCancel(ctx), t.id)
	return out, err
}

// branchForFork captures a running sandbox for one fork call. The snapshot has no
// tag and goes with its last user. It returns also the labels that children inherit.
func (s *Service) branchForFork(ctx context.Context, e *entry, f Fork) (string, map[string]string, error) {
	source := e.snapshot()
	if err := checkSecrets("sandbox "+source.ID, source.HoldsSecrets, f.WithSecrets); err != nil {
		return "", nil, err
	}
	b, err := s.captureRunning(ctx, e, taking{
		id: ident.New(ident.Snapshot), mode: ModeLive, wait: true, freeze: true, kind: labelBranchedFrom,
		labels: map[string]string{labelAnonymous: "true"},
	})
	return b.Snapshot.ID, inherited(source), err
}

// collect deletes an anonymous snapshot that nobody uses any more.
func (s *Service) collect(id string) {
	m, err := s.cfg.Store.Get(id)
	if err != nil || !s.collectable(m) {
		return
	}
	if len(s.cfg.Store.Holders(id)) > 0 || len(s.cfg.Store.Dependents(id)) > 0 {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	err = s.removeSnapshot(ctx, id)
	if err != nil && !errors.Is(err, errdefs.ErrConflict) && !errors.Is(err, errdefs.ErrNotFound) { // else somebody was faster
		s.cfg.Log("collect snapshot %s: %v", id, err)
	}
}

// collectable tells whether a snapshot goes with its last user: one made for a fork
// call, or a checkpoint whose sandbox is gone.
func (s *Service) collectable(m snapshot.Manifest) bool {
	if m.Labels[labelAnonymous] != "" {
		return true
	}
	of := m.Labels[labelCheckpointOf]
	if of == "" {
		return false
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.entries[of] == nil
}

// collectAll deletes the anonymous snapshots that a crash left without users.
func (s *Service) collectAll() {
	for _, m := range s.cfg.Store.List() {
		s.collect(m.ID)
	}
}
