package rest

import (
	"context"
	"net/http"

	api "forkd.dev/forkd/api/rest"
	"forkd.dev/forkd/internal/errdefs"
	"forkd.dev/forkd/internal/ident"
	"forkd.dev/forkd/internal/sandbox"
)

// Brancher captures running sandboxes.
type Brancher interface {
	Branch(ctx context.Context, ref string, b sandbox.Branch) (sandbox.Branched, error)
}

func (s *server) branch(w http.ResponseWriter, r *http.Request) error {
	ref, err := reference(r)
	if err != nil {
		return err
	}
	var req api.BranchSandbox
	if r.ContentLength != 0 {
		if err := decode(r, &req); err != nil {
			return err
		}
	}
	b, err := branchOf(req)
	if err != nil {
		return err
	}
	res, err := s.svc.Branch(r.Context(), ref, b)
	if err != nil {
		return err
	}
	status := http.StatusCreated
	if b.NoWait {
		status = http.StatusAccepted
	}
	respond(w, status, branchAnswer(res, b.Mode == sandbox.ModeDiff || req.MeasureDiff))
	return nil
}

// branchOf checks a request by upstream's rules and turns it into what the service
// is asked. Without any mode the service chooses, so wait:false is not refused then,
// where upstream falls back to full.
func branchOf(req api.BranchSandbox) (sandbox.Branch, error) {
	b := sandbox.Branch{
		Tag: req.Tag, Replace: req.Replace, Labels: req.Labels, Mode: sandbox.Mode(req.Mode), Sync: req.Sync, From: req.ParentTag,
		NoWait: req.Wait != nil && !*req.Wait, NoFreeze: req.Freeze != nil && !*req.Freeze, WithSecrets: req.WithSecrets,
	}
	old := 0
	for _, legacy := range []struct {
		set  bool
		mode sandbox.Mode
	}{{req.Diff, sandbox.ModeDiff}, {req.Live, sandbox.ModeLive}, {req.MeasureDiff, sandbox.ModeFull}} {
		if legacy.set {
			old++
			b.Mode = legacy.mode
		}
	}
	switch {
	case req.Mode != "" && (req.Diff || req.Live):
		return b, errdefs.New(errdefs.ErrInvalid, "mode is given together with diff or live, its old spellings")
	case old > 1:
		return b, errdefs.New(errdefs.ErrInvalid, "more than one of measure_diff, diff and live is true")
	case req.MeasureDiff && req.Mode != "" && req.Mode != string(sandbox.ModeFull):
		return b, errdefs.New(errdefs.ErrInvalid, "measure_diff is for mode full, not %.40q", req.Mode)
	case b.NoWait && b.Mode != "" && b.Mode != sandbox.ModeLive:
		return b, errdefs.WithHint(errdefs.New(errdefs.ErrInvalid, "wait false is for mode live, not %.40q", b.Mode), "leave mode out, or wait")
	case req.ParentTag != "" && b.Mode != sandbox.ModeDiff:
		return b, errdefs.New(errdefs.ErrInvalid, "parent_tag is for mode diff only")
	case req.Tag != "":
		if err := ident.CheckTag(req.Tag); err != nil {
			return b, err
		}
	}
	if req.ParentTag != "" {
		return b, ident.CheckRef(req.ParentTag)
	}
	return b, nil
}

func branchAnswer(res sandbox.Branched, diff bool) api.Branch {
	out := api.Branch{
		Snapshot: snapshotOf(res.Snapshot), StallMS: ms(res.Stall), CopiedBytes: res.CopiedBytes, LayerBytes: res.LayerBytes,
	}
	pause := ms(res.Pause)
	out.PauseMS, out.BranchedFrom = &pause, res.SourceID
	if diff {
		physical, logical := res.LayerBytes, int64(res.Snapshot.Shape.MemoryMiB)<<20
		out.DiffMS, out.DiffPhysicalBytes, out.DiffLogicalBytes = &pause, &physical, &logical
	}
	return out
}
