package resttest

import (
	"context"
	"fmt"
	"slices"

	"forkd.dev/forkd/internal/engine"
	"forkd.dev/forkd/internal/errdefs"
	"forkd.dev/forkd/internal/sandbox"
)

// SetWarmPool implements rest.Operator: a pool is full at once.
func (s *Service) SetWarmPool(ctx context.Context, ref string, n int) (sandbox.WarmPool, error) {
	sn, err := s.Snapshot(ctx, ref)
	if err != nil {
		return sandbox.WarmPool{}, err
	}
	if n < 0 || n > sandbox.MaxWarm {
		return sandbox.WarmPool{}, errdefs.New(errdefs.ErrInvalid, "cannot keep %d warm machines", n)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.setPoolLocked(sn, func(p *sandbox.WarmPool) { p.Want, p.Ready = n, n }), nil
}

// SetBlankPool implements rest.Operator: a pool is full at once.
func (s *Service) SetBlankPool(ctx context.Context, ref string, n int) (sandbox.WarmPool, error) {
	sn, err := s.Snapshot(ctx, ref)
	if err != nil {
		return sandbox.WarmPool{}, err
	}
	if n < sandbox.DefaultBlank || n > sandbox.MaxWarm {
		return sandbox.WarmPool{}, errdefs.New(errdefs.ErrInvalid, "cannot keep %d blank machines", n)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.setPoolLocked(sn, func(p *sandbox.WarmPool) { p.Blank, p.BlankReady = max(n, 0), max(n, 0) }), nil
}

// setPoolLocked changes the pools of a snapshot; what is empty is not listed.
func (s *Service) setPoolLocked(sn sandbox.Snapshot, change func(*sandbox.WarmPool)) sandbox.WarmPool {
	s.changes++
	p := sandbox.WarmPool{SnapshotID: sn.ID, Tags: sn.Tags}
	s.pools = slices.DeleteFunc(s.pools, func(q sandbox.WarmPool) bool {
		if q.SnapshotID == sn.ID {
			p = q
		}
		return q.SnapshotID == sn.ID
	})
	change(&p)
	if p.Want > 0 || p.Blank > 0 {
		s.pools = append(s.pools, p)
	}
	return p
}

// WarmPools implements rest.Operator.
func (s *Service) WarmPools(context.Context) ([]sandbox.WarmPool, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.pools), s.Err
}

// Stats implements rest.Operator.
func (s *Service) Stats(ctx context.Context) ([]sandbox.Stat, error) {
	all, err := s.Sandboxes(ctx)
	var out []sandbox.Stat
	for _, sb := range all {
		var u engine.Usage
		if u, err = s.Usage(ctx, sb.ID); err != nil {
			return nil, err
		}
		out = append(out, sandbox.Stat{Sandbox: sb, Usage: u})
	}
	return out, err
}

// Logs implements rest.Operator: without OnLogs it prints two pieces, the second
// with bytes that would move a terminal's cursor.
func (s *Service) Logs(ctx context.Context, req sandbox.LogRequest, write func([]byte) error) error {
	if s.OnLogs != nil {
		return s.OnLogs(ctx, req, write)
	}
	_, err := s.Sandbox(ctx, req.Ref)
	if err != nil && req.Kind != sandbox.LogConsole {
		_, err = s.Snapshot(ctx, req.Ref)
	}
	if err != nil {
		return err
	}
	if err := write(fmt.Appendf(nil, "first line of %s (%s)\n", req.Ref, req.Kind)); err != nil {
		return err
	}
	return write([]byte("\x1b[2Jsecond\tline\xff\n"))
}
