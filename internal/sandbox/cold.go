package sandbox

import (
	"context"
	"fmt"
	"slices"
	"time"

	"forkd.dev/forkd/internal/agentwire"
	"forkd.dev/forkd/internal/engine"
	"forkd.dev/forkd/internal/errdefs"
	"forkd.dev/forkd/internal/store/snapshot"
)

// A cold fork boots from the disk of its snapshot. It takes seconds and has nothing of
// the snapshot's memory: no warm interpreter, no program that ran. It serves when the
// memory cannot be restored any more, or must not be. What is captured of it later
// needs no other snapshot.

// patience is how long a child may take until its agent answers.
func (b *batch) patience() time.Duration {
	if b.req.Cold {
		return bootTimeout
	}
	return helloTimeout
}

// bootFrom boots a child.
func (b *batch) bootFrom(ctx context.Context, spec engine.Spec) (engine.Machine, error) {
	booter, ok := b.s.cfg.Engine.(engine.ColdBooter)
	if !ok {
		return nil, errdefs.New(errdefs.ErrUnsupported, "engine %s cannot boot from the disk of a snapshot", b.s.cfg.Engine.Name())
	}
	return booter.BootFrom(ctx, spec, b.plan.chain)
}

// configure tells a freshly booted agent what a captured one knows, and has it wait for
// an identity as that does.
func configure(ctx context.Context, agent Agent) error {
	cfg := agentwire.BootConfig{Hostname: "forkd", HostTime: time.Now(), Entropy: newIdentity("", "", nil).Entropy}
	if err := agent.Boot(ctx, cfg); err != nil {
		return err
	}
	if err := agent.Prepare(ctx, agentwire.Prepare{}); err != nil {
		return err
	}
	return agent.Commit(ctx)
}

// booted does what the snapshot's memory would have had, as far as that is possible, and
// notes the rest in the receipt.
func (b *batch) booted(ctx context.Context, agent Agent, receipt *agentwire.Receipt) error {
	receipt.NotCovered = append(receipt.NotCovered, "it was booted from the disk of "+b.plan.name()+": programs that ran in the snapshot do not run")
	if warning := diskWarning(b.plan.manifest); warning != "" {
		receipt.NotCovered = append(receipt.NotCovered, warning)
	}
	if !slices.Contains(b.plan.manifest.Agent.WarmLanguages, "python") {
		return nil
	}
	if _, err := agent.WarmStart(ctx, "python", ""); err != nil {
		return fmt.Errorf("start the python runner: %w", err)
	}
	return nil
}

// diskWarning says what may be missing on the disk of a snapshot, or "".
func diskWarning(m snapshot.Manifest) string {
	if m.Disk != snapshot.DiskJournal {
		return ""
	}
	return "the disk of " + m.ID + " is as after a loss of power: what programs had written shortly before may be missing"
}
