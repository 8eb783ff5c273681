package e2e

import (
	"flag"
	"fmt"
	"math/rand/v2"
	"slices"
	"syscall"
	"testing"

	"forkd.dev/forkd/internal/sandbox/modeltest"
	forkd "forkd.dev/forkd/sdk/go"
)

var modelSeed = flag.Uint64("model-seed", 0, "seed of the model test; 0 draws one")

// TestModelOfRealMachines compares 60 random steps on real machines, with kills of
// machines and of the daemon among them, with what a simple model expects.
func TestModelOfRealMachines(t *testing.T) {
	w := running(t)
	base := w.snapshot(t, "model-base", "--warm", "value = 'base'", "--exec", "printf base >/root/data")
	h := &realHost{w: w, t: t}
	before, err := h.Snapshots()
	if err != nil {
		t.Fatal(err)
	}
	for _, s := range before {
		if s.ID != base.ID {
			h.others = append(h.others, s.ID)
		}
	}
	seed := *modelSeed
	if seed == 0 {
		seed = rand.Uint64()
	}
	modeltest.Run(t, h, modeltest.Config{
		Seed: seed, Steps: 60, Base: base.ID, BaseIs: modeltest.Content{Memory: "base", Disk: "base"},
		MaxSandboxes: 6, MaxSnapshots: 12, CheckEvery: 30,
	})
	left, err := h.Snapshots()
	if err != nil {
		t.Fatal(err)
	}
	slices.Reverse(left) // children are younger than their parents
	for _, s := range left {
		if s.ID == base.ID {
			continue
		}
		if got := w.cli(t, "snapshot", "rm", "--cascade", s.ID); got.code != 0 && got.code != 3 { // it went with another
			t.Errorf("remove snapshot %s: %+v", s.ID, got)
		}
	}
}

// realHost is a daemon with real machines.
type realHost struct {
	w      *world
	t      *testing.T
	others []string // snapshots that are none of the model's
}

func (h *realHost) Fork(ref string) (string, error) {
	res, err := h.w.client.Fork(h.t.Context(), forkd.ForkRequest{SnapshotTag: ref}, nil)
	if err != nil {
		return "", err
	}
	return res.Sandboxes[0].ID, nil
}

func (h *realHost) eval(id, code string) (string, error) {
	res, err := h.w.client.Eval(h.t.Context(), id, forkd.EvalRequest{Code: code})
	if err == nil && res.Error != nil {
		err = fmt.Errorf("eval %q: %s", code, *res.Error)
	}
	return string(res.StdoutBytes()), err
}

func (h *realHost) Write(id string, c modeltest.Content) error {
	_, err := h.eval(id, fmt.Sprintf("value = %q\nwith open('/root/data', 'w') as f: f.write(%q)", c.Memory, c.Disk))
	return err
}

func (h *realHost) Read(id string) (c modeltest.Content, err error) {
	if c.Memory, err = h.eval(id, "print(value, end='')"); err != nil {
		return c, err
	}
	c.Disk, err = h.eval(id, "print(open('/root/data').read(), end='')")
	return c, err
}

func (h *realHost) Branch(id, tag string) (string, error) {
	b, err := h.w.client.Branch(h.t.Context(), id, forkd.BranchRequest{Tag: tag})
	return b.ID, err
}

func (h *realHost) Checkpoint(id string) (string, error) {
	b, err := h.w.client.Checkpoint(h.t.Context(), id, forkd.CheckpointRequest{Sync: true})
	return b.ID, err
}

func (h *realHost) Rollback(id, checkpoint string) error {
	_, err := h.w.client.Rollback(h.t.Context(), id, checkpoint)
	return err
}

func (h *realHost) Kill(id string) error { return h.w.client.Kill(h.t.Context(), id) }

func (h *realHost) Delete(id string) error {
	return h.w.client.DeleteSnapshot(h.t.Context(), id, forkd.DeleteAlone)
}

func (h *realHost) Compact(id, tag string) (string, error) {
	sn, err := h.w.client.CompactSnapshot(h.t.Context(), id, forkd.CompactRequest{To: tag}, nil)
	return sn.ID, err
}

func (h *realHost) Crash(id string) error {
	sb, err := h.w.client.Sandbox(h.t.Context(), id)
	if err != nil {
		return err
	}
	if err := syscall.Kill(*sb.PID, syscall.SIGKILL); err != nil {
		return err
	}
	return waitUntil(endPatience, func() error {
		sb, err := h.w.client.Sandbox(h.t.Context(), id)
		if err == nil && sb.State != "lost" && sb.State != "failed" {
			err = fmt.Errorf("the sandbox is %s", sb.State)
		}
		return err
	})
}

func (h *realHost) Restart(orderly bool) error {
	sig := syscall.SIGKILL
	if orderly {
		sig = syscall.SIGTERM
	}
	if err := h.w.end(sig); err != nil {
		return err
	}
	return h.w.start()
}

func (h *realHost) Snapshots() ([]modeltest.State, error) {
	list, err := h.w.client.Snapshots(h.t.Context())
	var out []modeltest.State
	for _, sn := range list {
		if !slices.Contains(h.others, sn.ID) {
			out = append(out, modeltest.State{ID: sn.ID, ParentID: sn.ParentID, Users: sn.Sandboxes, Passing: sn.Labels["forkd.anonymous"] != ""})
		}
	}
	return out, err
}

func (h *realHost) Sandboxes() ([]string, error) {
	list, err := h.w.client.Sandboxes(h.t.Context())
	var out []string
	for _, sb := range list {
		if sb.EndedAtUnix == nil {
			out = append(out, sb.ID)
		}
	}
	return out, err
}
