package rest

import (
	"context"
	"math"
	"net/http"
	"time"

	api "forkd.dev/forkd/api/rest"
	"forkd.dev/forkd/internal/errdefs"
	"forkd.dev/forkd/internal/ident"
	"forkd.dev/forkd/internal/sandbox"
)

// Layers is what can be done with stored snapshots beside forking them. progress may
// be nil.
type Layers interface {
	CompactSnapshot(ctx context.Context, c sandbox.Compact, progress sandbox.Progress) (sandbox.Snapshot, error)
	RebuildSnapshot(ctx context.Context, ref string, progress sandbox.Progress) (sandbox.Snapshot, error)
	Verify(ctx context.Context, v sandbox.Verify, progress sandbox.Progress) ([]sandbox.Verified, error)
	DiskUsage(ctx context.Context) (sandbox.DiskUsage, error)
	Prune(ctx context.Context, p sandbox.Prune) ([]sandbox.Pruned, error)
}

// layerRoutes lists the routes of Layers.
func (s *server) layerRoutes() []route {
	return []route{
		{method: "POST", path: "/v1/snapshots/{ref}/compact", handle: s.replays.wrap(s.compact)},
		{method: "POST", path: "/v1/snapshots/{ref}/rebuild", handle: s.replays.wrap(s.rebuild)},
		{method: "POST", path: "/v1/verify", handle: s.verify},
		{method: "POST", path: "/v1/prune", handle: s.prune},
		{method: "GET", path: "/v1/df", handle: s.getDiskUsage},
	}
}

func (s *server) compact(w http.ResponseWriter, r *http.Request) error {
	ref, err := reference(r)
	if err != nil {
		return err
	}
	var req api.CompactSnapshot
	if err := decode(r, &req); err != nil {
		return err
	}
	if req.To == "" {
		return missing("to")
	}
	if err := ident.CheckTag(req.To); err != nil {
		return err
	}
	if req.To == ref {
		return errdefs.New(errdefs.ErrInvalid, "to is %s, the snapshot that is to be compacted", req.To)
	}
	return s.makeSnapshot(w, r, http.StatusOK, func(ctx context.Context, progress sandbox.Progress) (sandbox.Snapshot, error) {
		return s.svc.CompactSnapshot(ctx, sandbox.Compact{From: ref, To: req.To, Replace: req.Replace, WithSecrets: req.WithSecrets}, progress)
	})
}

func (s *server) rebuild(w http.ResponseWriter, r *http.Request) error {
	ref, err := reference(r)
	if err != nil {
		return err
	}
	return s.makeSnapshot(w, r, http.StatusCreated, func(ctx context.Context, progress sandbox.Progress) (sandbox.Snapshot, error) {
		return s.svc.RebuildSnapshot(ctx, ref, progress)
	})
}

// makeSnapshot answers with the snapshot that make makes, line by line if asked to.
func (s *server) makeSnapshot(w http.ResponseWriter, r *http.Request, status int, make func(context.Context, sandbox.Progress) (sandbox.Snapshot, error)) error {
	if !wantsStream(r) {
		sn, err := make(r.Context(), nil)
		if err != nil {
			return err
		}
		respond(w, status, snapshotOf(sn))
		return nil
	}
	out := &stream{w: w}
	sn, err := make(r.Context(), func(step string, fraction float64) {
		out.line(api.SnapshotLine{Progress: &api.Progress{Step: step, Fraction: fraction}})
	})
	last := api.SnapshotLine{Done: true}
	switch {
	case err != nil && !out.started():
		return err
	case err != nil:
		b := body(err)
		last.Error, last.Code, last.Hint = b.Error, b.Code, b.Hint
		forget(w)
	default:
		info := snapshotOf(sn)
		last.Snapshot = &info
	}
	out.line(last)
	return nil
}

func (s *server) verify(w http.ResponseWriter, r *http.Request) error {
	var req api.Verify
	if r.ContentLength != 0 {
		if err := decode(r, &req); err != nil {
			return err
		}
	}
	if req.Snapshot != "" {
		if err := ident.CheckRef(req.Snapshot); err != nil {
			return err
		}
	}
	v := sandbox.Verify{Snapshot: req.Snapshot, Repair: req.Repair}
	if !wantsStream(r) {
		found, err := s.svc.Verify(r.Context(), v, nil)
		if err != nil {
			return err
		}
		respond(w, http.StatusOK, verifyResult(found))
		return nil
	}
	out := &stream{w: w}
	found, err := s.svc.Verify(r.Context(), v, func(step string, fraction float64) {
		out.line(api.VerifyLine{Progress: &api.Progress{Step: step, Fraction: fraction}})
	})
	if err != nil && !out.started() {
		return err
	}
	last := api.VerifyLine{Done: true}
	if err != nil {
		b := body(err)
		last.Error, last.Code, last.Hint = b.Error, b.Code, b.Hint
	} else {
		res := verifyResult(found)
		last.Result = &res
	}
	out.line(last)
	return nil
}

func verifyResult(found []sandbox.Verified) api.VerifyResult {
	out := api.VerifyResult{Checked: convert(found, func(v sandbox.Verified) api.Verified {
		one := api.Verified{Kind: v.Kind, ID: v.ID, Name: v.Name, Bytes: v.Bytes, OK: v.Err == nil, Marked: v.Marked, Rebuild: v.Rebuild}
		if v.Err != nil {
			one.Error = v.Err.Error()
		}
		return one
	})}
	for _, v := range out.Checked {
		if !v.OK {
			out.Damaged++
		}
	}
	return out
}

func (s *server) prune(w http.ResponseWriter, r *http.Request) error {
	var req api.Prune
	if err := decode(r, &req); err != nil {
		return err
	}
	p := sandbox.Prune{Labels: req.Labels, DryRun: req.DryRun}
	const most = float64(math.MaxInt64) / float64(time.Second)
	if math.IsNaN(req.OlderSecs) || req.OlderSecs < 0 || req.OlderSecs >= most {
		return errdefs.New(errdefs.ErrInvalid, "older_secs is %g, want a time span", req.OlderSecs)
	}
	p.Older = time.Duration(req.OlderSecs * float64(time.Second))
	if req.Keep != nil {
		if *req.Keep < 0 {
			return errdefs.New(errdefs.ErrInvalid, "keep is %d, want 0 or more", *req.Keep)
		}
		p.Keep, p.HasKeep = *req.Keep, true
	}
	list, err := s.svc.Prune(r.Context(), p)
	if err != nil {
		return err
	}
	out := api.PruneResult{DryRun: p.DryRun, Snapshots: convert(list, func(p sandbox.Pruned) api.Pruned {
		return api.Pruned{ID: p.Snapshot.ID, Tags: orNone(p.Snapshot.Tags), Bytes: p.Bytes, Kept: p.Kept}
	})}
	for _, p := range out.Snapshots {
		if p.Kept == "" {
			out.FreedBytes += p.Bytes
		}
	}
	respond(w, http.StatusOK, out)
	return nil
}

func (s *server) getDiskUsage(w http.ResponseWriter, r *http.Request) error {
	u, err := s.svc.DiskUsage(r.Context())
	if err != nil {
		return err
	}
	out := api.DiskUsage{
		Snapshots: convert(u.Snapshots, snapshotUseOf), Pools: convert(u.Pools, poolOf), Resident: []api.Resident{}, Images: []api.ImageUse{},
		SnapshotBytes: u.SnapshotBytes, ImageBytes: u.ImageBytes, SandboxBytes: u.SandboxBytes, ResidentBytes: u.ResidentBytes,
		OccupiedBytes: u.OccupiedBytes, FreeBytes: u.FreeBytes, TotalBytes: u.TotalBytes, MinFreeBytes: u.MinFreeBytes,
	}
	for _, res := range u.Resident {
		out.Resident = append(out.Resident, api.Resident{SnapshotID: res.SnapshotID, Bytes: res.Bytes, Machines: res.Machines})
	}
	for _, im := range u.Images {
		out.Images = append(out.Images, api.ImageUse{ID: im.ID, Name: im.Name, Bytes: im.Bytes, UsedBy: orNone(im.UsedBy)})
	}
	respond(w, http.StatusOK, out)
	return nil
}

func snapshotUseOf(u sandbox.SnapshotUse) api.SnapshotUse {
	sn := u.Snapshot
	return api.SnapshotUse{
		ID: sn.ID, Tags: orNone(sn.Tags), Status: string(sn.Status), ParentID: sn.ParentID,
		OwnBytes: u.OwnBytes, SharedBytes: u.SharedBytes, LogicalBytes: int64(sn.Shape.MemoryMiB+sn.Shape.DiskMiB) << 20,
		ResidentBytes: u.ResidentBytes, Dependents: u.Dependents, Sandboxes: sn.Sandboxes, Prepared: u.Prepared,
	}
}
