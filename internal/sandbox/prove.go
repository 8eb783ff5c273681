package sandbox

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"forkd.dev/forkd/internal/agentwire"
	"forkd.dev/forkd/internal/engine"
	"forkd.dev/forkd/internal/errdefs"
	"forkd.dev/forkd/internal/ident"
)

// Proof says what to prove an engine with.
type Proof struct {
	Engine  engine.Driver
	Connect ConnectFunc
	Dir     string // existing and empty; the caller removes it
	Root    engine.Root
	Shape   engine.Shape
}

// Prove shows that an engine works here: it boots a machine, captures it, restores
// it and lets the agent in it take a new identity, as every fork does. Nothing is left
// but files in the directory. ErrUnavailable: it does not work, and why.
func Prove(ctx context.Context, p Proof) error {
	if err := p.run(ctx); err != nil {
		if ctx.Err() != nil {
			err = fmt.Errorf("it did not get through in time: %w", ctx.Err())
		}
		return errdefs.As(errdefs.ErrUnavailable, fmt.Errorf("prove engine %s: %w", p.Engine.Name(), err))
	}
	return nil
}

func (p Proof) run(ctx context.Context) (err error) {
	state := engine.State{ID: ident.New(ident.Snapshot), Dir: filepath.Join(p.Dir, "state")}
	if err := os.Mkdir(state.Dir, 0o755); err != nil {
		return fmt.Errorf("make a directory: %w", err)
	}
	defer p.Engine.Forget(state.ID)
	err = p.with(ctx, "boot a machine", func(spec engine.Spec) (engine.Machine, error) { return p.Engine.Boot(ctx, spec) },
		func(m engine.Machine) error {
			state.Artifacts, err = p.capture(ctx, m, state.Dir)
			return err
		})
	if err != nil {
		return err
	}
	return p.with(ctx, "restore the machine", func(spec engine.Spec) (engine.Machine, error) {
		return p.Engine.Restore(ctx, spec, []engine.State{state})
	}, func(m engine.Machine) error { return p.answer(ctx, m) })
}

// with makes a machine, uses it and removes all of it.
func (p Proof) with(ctx context.Context, what string, start func(engine.Spec) (engine.Machine, error), use func(engine.Machine) error) (err error) {
	id := ident.New(ident.Sandbox)
	dir := filepath.Join(p.Dir, id)
	if err := os.Mkdir(dir, 0o711); err != nil {
		return fmt.Errorf("make a directory: %w", err)
	}
	defer func() {
		clean, cancel := context.WithTimeout(context.WithoutCancel(ctx), 30*time.Second)
		defer cancel()
		err = errors.Join(err, p.Engine.Reap(clean, id, dir))
	}()
	m, err := start(engine.Spec{ID: id, Dir: dir, Shape: p.Shape, Root: p.Root})
	if err == nil {
		if err = use(m); err != nil {
			err = fmt.Errorf("%w%s", err, lastLine(m))
		}
		clean, cancel := context.WithTimeout(context.WithoutCancel(ctx), 30*time.Second)
		defer cancel()
		err = errors.Join(err, m.Kill(clean))
	}
	if err != nil {
		return fmt.Errorf("%s: %w", what, err)
	}
	return nil
}

// lastLine is the last line that a guest's kernel printed, for an error text.
func lastLine(m engine.Machine) string {
	r, err := m.Console()
	if err != nil {
		return ""
	}
	defer r.Close()
	buf := make([]byte, 64<<10)
	n, _ := r.Read(buf)
	lines := strings.Split(strings.TrimSpace(string(buf[:n])), "\n")
	if last := lines[len(lines)-1]; last != "" {
		return fmt.Sprintf("; its console ends with: %.300s", last)
	}
	return ""
}

// capture sets up the agent of a booted machine and stores its state.
func (p Proof) capture(ctx context.Context, m engine.Machine, dir string) ([]engine.Artifact, error) {
	link := newLink(m, p.Connect, bootTimeout)
	defer link.close()
	a, err := link.get(ctx)
	if err != nil {
		return nil, err
	}
	id := newIdentity(m.ID(), "forkd", nil)
	if err := a.Boot(ctx, agentwire.BootConfig{Hostname: id.Hostname, HostTime: id.HostTime, Entropy: id.Entropy}); err != nil {
		return nil, err
	}
	if err := a.Prepare(ctx, agentwire.Prepare{Sync: true}); err != nil {
		return nil, err
	}
	if err := a.Commit(ctx); err != nil {
		return nil, err
	}
	res, err := m.Capture(ctx, engine.CaptureSpec{Dir: dir, After: engine.AfterEnd})
	return res.Artifacts, err
}

// answer lets a restored machine go on as a fork and asks its agent.
func (p Proof) answer(ctx context.Context, m engine.Machine) error {
	link := newLink(m, p.Connect, helloTimeout)
	defer link.close()
	if err := m.Resume(ctx); err != nil {
		return err
	}
	a, err := link.get(ctx)
	if err != nil {
		return err
	}
	if _, err := a.VerdictFork(ctx, newIdentity(m.ID(), "proof", nil)); err != nil {
		return err
	}
	_, err = a.Ping(ctx)
	return err
}
