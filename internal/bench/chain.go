package bench

import (
	"context"
	"errors"
	"fmt"
	"time"

	"forkd.dev/forkd/internal/errdefs"
	forkd "forkd.dev/forkd/sdk/go"
)

// ChainOptions say what Chain measures.
type ChainOptions struct {
	Snapshot string
	Depth    int // layers
	LayerMiB int // written for each
	Count    int // forks of each
}

// Validate tells what is wrong with o.
func (o ChainOptions) Validate() error {
	switch {
	case o.Depth < 1 || o.Depth > 100:
		return errdefs.New(errdefs.ErrInvalid, "cannot measure %d layers: 1 to 100 are possible", o.Depth)
	case o.LayerMiB < 1 || o.LayerMiB > 64<<10:
		return errdefs.New(errdefs.ErrInvalid, "cannot make layers of %d MiB: 1 to 65536 are possible", o.LayerMiB)
	case o.Count < 1 || o.Count > maxRuns:
		return errdefs.New(errdefs.ErrInvalid, "cannot measure %d forks: 1 to %d are possible", o.Count, maxRuns)
	}
	return nil
}

// ChainReport is the result of measuring forks of a chain and of the same state flat.
// The names in JSON stay.
type ChainReport struct {
	About
	Layers   int        `json:"layers"`
	LayerMiB int        `json:"layer_mib"`
	Ratio    *float64   `json:"ratio"` // of the chain's p50 to the flat one's
	Rows     []ChainRow `json:"rows"`  // the chain, the flat one
}

// ChainRow is forks of one snapshot.
type ChainRow struct {
	Depth      int     `json:"depth"`       // number of its ancestors
	ForkP50MS  float64 `json:"fork_p50_ms"` // request to the first answer
	LayerBytes int64   `json:"layer_bytes"` // of all its layers that were made for this
	ResidentMS float64 `json:"resident_ms"` // what the very first fork took longer
	FirstMS    float64 `json:"first_ms"`
	Forks      int     `json:"forks"`

	of    *subject
	times []float64
}

// Chain measures forks of a chain of layers next to forks of the same state in one.
func Chain(ctx context.Context, cfg Config, o ChainOptions) (_ *ChainReport, err error) {
	if err := o.Validate(); err != nil {
		return nil, err
	}
	s, machine, err := openQuiet(ctx, cfg, o.Snapshot, 0)
	defer func() { err = errors.Join(err, s.close(ctx)) }()
	if err != nil {
		return nil, err
	}
	if o.Depth*o.LayerMiB > s.memoryMiB/2 {
		return nil, errdefs.New(errdefs.ErrInvalid, "cannot write %d times %d MiB in machines of %d MiB", o.Depth, o.LayerMiB, s.memoryMiB)
	}
	r := &ChainReport{About: s.about("chain", machine), Layers: o.Depth, LayerMiB: o.LayerMiB}
	top, err := s.layers(ctx, o)
	if err != nil {
		return nil, err
	}
	cfg.step("making the same state flat")
	tag := "bench-" + s.mark + "-flat"
	flat, err := cfg.Client.CompactSnapshot(ctx, top.of.ref, forkd.CompactRequest{To: tag}, cfg.Progress)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, s.remove(ctx, flat.ID)) }()
	rows := []*ChainRow{top, {Depth: flat.ChainDepth, LayerBytes: flat.MemoryBytes + flat.DiskBytes, of: s.of(flat.ID)}}
	if err := forksInTurn(ctx, rows, o.Count); err != nil {
		return nil, err
	}
	for _, row := range rows {
		r.Rows = append(r.Rows, *row)
	}
	if rows[1].ForkP50MS > 0 {
		r.Ratio = ptr(round(rows[0].ForkP50MS/rows[1].ForkP50MS, 3))
	}
	return r, nil
}

// remove deletes a snapshot, also if ctx has ended.
func (s *subject) remove(ctx context.Context, id string) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), cleanUpTime)
	defer cancel()
	if err := s.cfg.Client.DeleteSnapshot(ctx, id, forkd.DeleteAlone); err != nil && !errors.Is(err, forkd.ErrNotFound) {
		return fmt.Errorf("delete snapshot %s: %w", id, err)
	}
	return nil
}

// layers makes a chain: each layer is a branch of a fork of the one below it.
func (s *subject) layers(ctx context.Context, o ChainOptions) (*ChainRow, error) {
	row := &ChainRow{of: s}
	for i := range o.Depth {
		s.cfg.step("layer %d of %d", i+1, o.Depth)
		sn, err := row.of.layer(ctx, o.LayerMiB, i)
		if err != nil {
			return nil, fmt.Errorf("make layer %d: %w", i+1, err)
		}
		row.Depth = sn.ChainDepth
		row.LayerBytes += sn.MemoryBytes + sn.DiskBytes
		row.of = s.of(sn.ID)
	}
	return row, nil
}

func (s *subject) layer(ctx context.Context, mib, i int) (_ forkd.Snapshot, err error) {
	if err := s.emptyPools(ctx); err != nil {
		return forkd.Snapshot{}, err
	}
	sb, err := s.source(ctx)
	if err != nil {
		return forkd.Snapshot{}, err
	}
	defer func() { err = errors.Join(err, s.kill(ctx, []string{sb.ID})) }()
	if err := s.dirty(ctx, sb.ID, mib, i, i); err != nil {
		return forkd.Snapshot{}, err
	}
	made, err := s.cfg.Client.Branch(ctx, sb.ID, forkd.BranchRequest{
		Mode: "diff", Tag: fmt.Sprintf("bench-%s-layer%d", s.mark, i+1), Labels: map[string]string{markLabel: s.mark},
	})
	if err != nil {
		return forkd.Snapshot{}, err
	}
	return s.ready(ctx, made.ID)
}

// forksInTurn forks one of each row, again and again. The first fork of each, for
// which the daemon puts its memory together, counts apart.
func forksInTurn(ctx context.Context, rows []*ChainRow, count int) error {
	for i := range count + 1 {
		for _, row := range rows {
			if err := row.of.emptyPools(ctx); err != nil {
				return err
			}
			row.of.cfg.step("forks of depth %d: %d of %d", row.Depth, i, count)
			forks, err := row.of.forks(ctx, 1)
			switch {
			case err != nil:
				return err
			case forks.Answered != 1:
				return fmt.Errorf("%w: depth %d: %v", ErrAnswers, row.Depth, forks.Failures)
			case i == 0:
				row.FirstMS = forks.P50MS
			default:
				row.times = append(row.times, forks.P50MS)
			}
		}
		if err := pass(ctx, 50*time.Millisecond); err != nil { // for the end of what was killed
			return err
		}
	}
	for _, row := range rows {
		row.Forks, row.ForkP50MS = len(row.times), percentile(row.times, 50)
		row.ResidentMS = round(max(row.FirstMS-row.ForkP50MS, 0), 2)
	}
	return nil
}
