package bench

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"forkd.dev/forkd/internal/errdefs"
	forkd "forkd.dev/forkd/sdk/go"
)

// The ways to come back to a node of a search.
const (
	SearchRollback  = "rollback"
	SearchFork      = "fork"
	SearchColdStart = "cold_start"
)

// SearchOptions say what Search measures.
type SearchOptions struct {
	Snapshot  string
	Branching int // moves at each node
	Depth     int // of the tree
	ColdNodes int // a cold start takes seconds, so a few nodes must do; 0 for none
}

// maxNodes bounds a toy tree.
const maxNodes = 10_000

// Validate tells what is wrong with o.
func (o SearchOptions) Validate() error {
	if o.Branching < 1 || o.Branching > 100 || o.Depth < 1 || o.Depth > 20 || o.nodes() > maxNodes {
		return errdefs.New(errdefs.ErrInvalid, "cannot search a tree of %d moves and depth %d: at most %d nodes are possible", o.Branching, o.Depth, maxNodes)
	}
	if o.ColdNodes < 0 || o.ColdNodes > 100 {
		return errdefs.New(errdefs.ErrInvalid, "%d cold starts asked for, 0 to 100 are possible", o.ColdNodes)
	}
	return nil
}

// nodes is the number of nodes below the root.
func (o SearchOptions) nodes() int {
	n, level := 0, 1
	for range o.Depth {
		level *= o.Branching
		n += level
		if n > maxNodes {
			break
		}
	}
	return n
}

// SearchReport is the result of a toy tree search. The names in JSON stay.
type SearchReport struct {
	About
	Branching int         `json:"branching"`
	Depth     int         `json:"depth"`
	Rows      []SearchRow `json:"rows"`
}

// SearchRow is one way to search.
type SearchRow struct {
	By        string   `json:"by"`
	Nodes     int      `json:"nodes"`
	TotalS    *float64 `json:"total_s"`
	NodesPerS *float64 `json:"nodes_per_s"`
	Correct   bool     `json:"correct"` // each node had the state of its path, and no other
	Skipped   string   `json:"skipped,omitempty"`
}

// Search measures a depth-first search in which each node is a state of a machine:
// its moves are made in the guest, and to try another one the machine must come back.
func Search(ctx context.Context, cfg Config, o SearchOptions) (_ *SearchReport, err error) {
	if err := o.Validate(); err != nil {
		return nil, err
	}
	s, machine, err := openQuiet(ctx, cfg, o.Snapshot, 0)
	defer func() { err = errors.Join(err, s.close(ctx)) }()
	if err != nil {
		return nil, err
	}
	r := &SearchReport{About: s.about("search", machine), Branching: o.Branching, Depth: o.Depth}
	for _, way := range []struct {
		by   string
		walk func(context.Context, *searcher) error
	}{{SearchRollback, s.byRollback}, {SearchFork, s.byFork}} {
		f := &searcher{s: s, o: o, by: way.by}
		start := time.Now()
		if err := way.walk(ctx, f); err != nil {
			return nil, fmt.Errorf("search by %s: %w", way.by, err)
		}
		took := time.Since(start).Seconds()
		r.Rows = append(r.Rows, SearchRow{
			By: way.by, Nodes: f.nodes, TotalS: ptr(round(took, 3)), NodesPerS: ptr(round(float64(f.nodes)/took, 3)),
			Correct: f.wrong == "" && f.nodes == o.nodes(), Skipped: f.wrong,
		})
	}
	if o.ColdNodes > 0 {
		row, err := s.byColdStart(ctx, o.ColdNodes)
		if err != nil {
			return nil, fmt.Errorf("search by cold start: %w", err)
		}
		r.Rows = append(r.Rows, row)
	}
	for _, row := range r.Rows {
		if row.TotalS != nil && !row.Correct {
			return r, fmt.Errorf("%w: search by %s: %s", ErrAnswers, row.By, row.Skipped)
		}
	}
	return r, nil
}

// searcher walks one tree.
type searcher struct {
	s     *subject
	o     SearchOptions
	by    string
	nodes int
	wrong string // the first node that was not as it must be
}

// move makes a move in a machine that is at path, and checks where that leads.
func (f *searcher) move(ctx context.Context, id string, path []string, m int) ([]string, error) {
	path = append(path[:len(path):len(path)], fmt.Sprint(m))
	code := fmt.Sprintf(`
try:
    bench_path.append("%[1]d")
except NameError:
    bench_path = ["%[1]d"]
"path:" + ".".join(bench_path)`, m)
	got, err := f.s.eval(ctx, id, code)
	if err != nil {
		return nil, err
	}
	f.nodes++
	f.s.cfg.step("search by %s: node %d of %d", f.by, f.nodes, f.o.nodes())
	if want := "'path:" + strings.Join(path, ".") + "'"; got != want && f.wrong == "" {
		f.wrong = fmt.Sprintf("node %s had the state %.80q", want, got)
	}
	return path, nil
}

// byRollback searches with one machine: a checkpoint at each inner node, and a
// rollback for each further move there.
func (s *subject) byRollback(ctx context.Context, f *searcher) (err error) {
	sb, err := s.source(ctx)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, s.kill(ctx, []string{sb.ID})) }()
	return f.rollBelow(ctx, sb.ID, nil)
}

func (f *searcher) rollBelow(ctx context.Context, id string, path []string) error {
	if len(path) == f.o.Depth {
		return nil
	}
	c := f.s.cfg.Client
	here, err := c.Checkpoint(ctx, id, forkd.CheckpointRequest{})
	if err != nil {
		return err
	}
	for m := range f.o.Branching {
		if m > 0 {
			if err := f.s.readyCheckpoint(ctx, id, here.ID); err != nil {
				return err
			}
			if _, err := c.Rollback(ctx, id, here.ID); err != nil {
				return err
			}
		}
		next, err := f.move(ctx, id, path, m)
		if err != nil {
			return err
		}
		if err := f.rollBelow(ctx, id, next); err != nil {
			return err
		}
	}
	// A checkpoint that is still being written would outlive its sandbox.
	return f.s.readyCheckpoint(ctx, id, here.ID)
}

// byFork searches with a machine for each node: one branch of each inner node, and
// its forks for the moves there.
func (s *subject) byFork(ctx context.Context, f *searcher) error {
	return f.forkBelow(ctx, s, nil)
}

func (f *searcher) forkBelow(ctx context.Context, from *subject, path []string) (err error) {
	made, err := from.fork(ctx, f.o.Branching, nil)
	var ids []string
	for _, sb := range made {
		ids = append(ids, sb.ID)
	}
	defer func() { err = errors.Join(err, f.s.kill(ctx, ids)) }()
	if err != nil {
		return err
	}
	if len(ids) != f.o.Branching {
		return fmt.Errorf("%w: %d of %d forks came up", ErrAnswers, len(ids), f.o.Branching)
	}
	for m, id := range ids {
		next, err := f.move(ctx, id, path, m)
		if err != nil {
			return err
		}
		if len(next) == f.o.Depth {
			continue
		}
		sn, err := f.s.cfg.Client.Branch(ctx, id, forkd.BranchRequest{
			Mode: "live", Tag: fmt.Sprintf("bench-%s-node%d", f.s.mark, f.nodes), Labels: map[string]string{markLabel: f.s.mark},
		})
		if err != nil {
			return err
		}
		if err := f.forkBelow(ctx, f.s.of(sn.ID), next); err != nil {
			return err
		}
	}
	return nil
}

// byColdStart boots a machine for each of a few nodes. The moves that lead to a node,
// which would have to be made again, are not counted.
func (s *subject) byColdStart(ctx context.Context, nodes int) (SearchRow, error) {
	row := SearchRow{By: SearchColdStart, Nodes: nodes, Correct: true}
	var total float64
	for i := range nodes {
		s.cfg.step("search by cold start: node %d of %d", i+1, nodes)
		cold, err := s.coldBoot(ctx)
		if err != nil {
			return row, err
		}
		if cold.MS == nil {
			row.Skipped, row.Correct = cold.Skipped, false
			return row, nil
		}
		total += *cold.MS / 1000
	}
	row.TotalS, row.NodesPerS = ptr(round(total, 3)), ptr(round(float64(nodes)/total, 3))
	return row, nil
}
