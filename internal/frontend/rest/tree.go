package rest

import (
	"context"
	"net/http"

	api "forkd.dev/forkd/api/rest"
	"forkd.dev/forkd/internal/agentwire"
	"forkd.dev/forkd/internal/ident"
	"forkd.dev/forkd/internal/sandbox"
)

// Historian tells where states come from and how they differ.
type Historian interface {
	Tree(ctx context.Context, ref string) ([]sandbox.Node, error)
	Diff(ctx context.Context, req sandbox.DiffRequest, progress sandbox.Progress) (sandbox.Diff, error)
}

func (s *server) getTree(w http.ResponseWriter, r *http.Request) error {
	ref := r.URL.Query().Get("ref")
	if ref != "" {
		if err := ident.CheckRef(ref); err != nil {
			return err
		}
	}
	nodes, err := s.svc.Tree(r.Context(), ref)
	if err != nil {
		return err
	}
	respond(w, http.StatusOK, convert(nodes, nodeOf))
	return nil
}

func nodeOf(n sandbox.Node) api.TreeNode {
	return api.TreeNode{
		ID: n.ID, Kind: string(n.Kind), ParentID: n.ParentID, Depth: n.Depth, Name: n.Name, State: n.State,
		Of: n.Of, Auto: n.Auto, Labels: orEmpty(n.Labels), CreatedAtUnix: n.CreatedAt.Unix(),
	}
}

func (s *server) diff(w http.ResponseWriter, r *http.Request) error {
	var req api.DiffStates
	if err := decode(r, &req); err != nil {
		return err
	}
	for name, ref := range map[string]string{"a": req.A, "b": req.B} {
		if ref == "" {
			return missing(name)
		}
		if err := ident.CheckRef(ref); err != nil {
			return err
		}
	}
	ask := sandbox.DiffRequest{A: req.A, B: req.B, Patch: req.Patch, Exclude: req.Exclude}
	if !wantsStream(r) {
		d, err := s.svc.Diff(r.Context(), ask, nil)
		if err != nil {
			return err
		}
		respond(w, http.StatusOK, diffOf(d))
		return nil
	}
	out := &stream{w: w}
	d, err := s.svc.Diff(r.Context(), ask, func(step string, fraction float64) {
		out.line(api.DiffLine{Progress: &api.Progress{Step: step, Fraction: fraction}})
	})
	last := api.DiffLine{Done: true}
	switch {
	case err != nil && !out.started():
		return err
	case err != nil:
		b := body(err)
		last.Error, last.Code, last.Hint = b.Error, b.Code, b.Hint
	default:
		answer := diffOf(d)
		last.Diff = &answer
	}
	out.line(last)
	return nil
}

func diffOf(d sandbox.Diff) api.Diff {
	return api.Diff{
		A: sideOf(d.A), B: sideOf(d.B), Changes: convert(d.Changes, changeOf), Truncated: d.Truncated,
		ProcessesAdded: convert(d.ProcessesAdded, processOf), ProcessesRemoved: convert(d.ProcessesRemoved, processOf),
		Patch: d.Patch, PatchSkipped: d.PatchSkipped, Warnings: d.Warnings, DurationMS: ms(d.Duration),
	}
}

func sideOf(s sandbox.DiffSide) api.DiffSide {
	return api.DiffSide{
		SnapshotID: s.SnapshotID, Files: s.Files, Processes: s.Processes,
		MemoryTotalKiB: s.Memory.TotalKiB, MemoryAvailableKiB: s.Memory.AvailableKiB,
	}
}

func changeOf(c sandbox.Change) api.FileChange {
	out := api.FileChange{Kind: string(c.Kind), Type: c.Type, What: c.What, SizeA: c.SizeA, SizeB: c.SizeB}
	out.Path, out.PathBase64 = text([]byte(c.Path))
	return out
}

func processOf(p agentwire.ProcessEntry) api.DiffProcess {
	return api.DiffProcess{PID: p.PID, Name: p.Name, Command: p.Command, RSSKiB: p.RSSKiB}
}
