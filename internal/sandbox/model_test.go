package sandbox

import (
	"flag"
	"fmt"
	"math/rand/v2"
	"testing"

	"forkd.dev/forkd/internal/agentwire"
	"forkd.dev/forkd/internal/sandbox/modeltest"
)

var modelSeed = flag.Uint64("model-seed", 0, "seed of the model test; 0 draws one")

// TestModel compares 1,000 random steps with what a simple model expects.
func TestModel(t *testing.T) {
	w := newWorld(t, nil)
	base := w.base()
	h := &modelHost{w}
	h.must(h.Write(w.fork("base", 1)[0].ID, modeltest.Content{})) // the names exist in the guest
	for _, sb := range must(w.svc.Sandboxes(w.ctx())) {
		h.must(w.svc.Kill(w.ctx(), sb.ID))
	}
	seed := *modelSeed
	if seed == 0 {
		seed = rand.Uint64()
	}
	steps := 1000
	if testing.Short() {
		steps = 200
	}
	modeltest.Run(t, h, modeltest.Config{
		Seed: seed, Steps: steps, Base: base.ID, BaseIs: modeltest.Content{Memory: "warm", Disk: "from base"},
		MaxSandboxes: 12, MaxSnapshots: 40, CheckEvery: 50,
	})
	w.consistent()
}

// modelHost is the service over the fake engine.
type modelHost struct{ w *world }

func (h *modelHost) must(err error) {
	h.w.t.Helper()
	if err != nil {
		h.w.t.Fatal(err)
	}
}

func (h *modelHost) Fork(ref string) (string, error) {
	items, err := h.w.svc.Fork(h.w.ctx(), Fork{Snapshot: ref, N: 1}, nil)
	if err != nil {
		return "", err
	}
	return items[0].Sandbox.ID, nil
}

func (h *modelHost) Write(id string, c modeltest.Content) error {
	if _, err := h.w.svc.Eval(h.w.ctx(), id, agentwire.EvalRequest{Code: "value=" + c.Memory}); err != nil {
		return err
	}
	_, err := h.w.svc.Exec(h.w.ctx(), id, agentwire.ExecRequest{Argv: []string{"write", "/data", c.Disk}})
	return err
}

func (h *modelHost) Read(id string) (modeltest.Content, error) {
	var c modeltest.Content
	value, err := h.w.svc.Eval(h.w.ctx(), id, agentwire.EvalRequest{Code: "value"})
	if err != nil {
		return c, err
	}
	file, err := h.w.svc.Exec(h.w.ctx(), id, agentwire.ExecRequest{Argv: []string{"cat", "/data"}})
	return modeltest.Content{Memory: value.Result, Disk: string(file.Stdout)}, err
}

func (h *modelHost) Branch(id, tag string) (string, error) {
	b, err := h.w.svc.Branch(h.w.ctx(), id, Branch{Tag: tag})
	return b.Snapshot.ID, err
}

func (h *modelHost) Checkpoint(id string) (string, error) {
	b, err := h.w.svc.Checkpoint(h.w.ctx(), id, Checkpoint{Sync: true})
	return b.Snapshot.ID, err
}

func (h *modelHost) Rollback(id, checkpoint string) error {
	_, err := h.w.svc.Rollback(h.w.ctx(), id, checkpoint)
	return err
}

func (h *modelHost) Kill(id string) error { return h.w.svc.Kill(h.w.ctx(), id) }

func (h *modelHost) Delete(id string) error { return h.w.svc.DeleteSnapshot(h.w.ctx(), id, Delete{}) }

func (h *modelHost) Compact(id, tag string) (string, error) {
	sn, err := h.w.svc.CompactSnapshot(h.w.ctx(), Compact{From: id, To: tag}, nil)
	return sn.ID, err
}

func (h *modelHost) Crash(id string) error {
	if !h.w.host.Crash(fromMachine(h.w, id), "crashed by the model") {
		return fmt.Errorf("sandbox %s has no machine", id)
	}
	h.w.eventually("the daemon knows", func() bool { return !must(h.w.svc.Sandbox(h.w.ctx(), id)).State.living() })
	h.w.eventually("its machine is removed", func() bool {
		row, err := h.w.journal.GetSandbox(h.w.ctx(), id)
		return err == nil && row.State != string(Running)
	})
	return nil
}

func (h *modelHost) Restart(orderly bool) error {
	if orderly {
		h.w.restart()
		return nil
	}
	h.w.dead()
	h.w.buried()
	return nil
}

func (h *modelHost) Snapshots() ([]modeltest.State, error) {
	list, err := h.w.svc.Snapshots(h.w.ctx())
	var out []modeltest.State
	for _, sn := range list {
		out = append(out, modeltest.State{ID: sn.ID, ParentID: sn.ParentID, Users: sn.Sandboxes, Passing: sn.Labels[labelAnonymous] != ""})
	}
	return out, err
}

func (h *modelHost) Sandboxes() ([]string, error) {
	list, err := h.w.svc.Sandboxes(h.w.ctx())
	var out []string
	for _, sb := range list {
		if sb.EndedAt.IsZero() {
			out = append(out, sb.ID)
		}
	}
	return out, err
}
