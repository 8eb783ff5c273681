package sandbox

import (
	"context"
	"errors"
	"runtime"
	"sync"

	"forkd.dev/forkd/internal/engine"
	"forkd.dev/forkd/internal/errdefs"
)

// Stat is what one living sandbox consumes.
type Stat struct {
	Sandbox Sandbox
	Usage   engine.Usage
}

// Stats measures all living sandboxes, oldest first. One that ends meanwhile is
// left out.
func (s *Service) Stats(ctx context.Context) ([]Stat, error) {
	all, err := s.Sandboxes(ctx)
	if err != nil {
		return nil, err
	}
	stats := make([]*Stat, len(all))
	errs := make([]error, len(all))
	// Measuring walks page tables: more at once than there are processors is no faster.
	slots := make(chan struct{}, runtime.NumCPU())
	var wg sync.WaitGroup
	for i, sb := range all {
		if !sb.State.living() {
			continue
		}
		wg.Go(func() {
			slots <- struct{}{}
			defer func() { <-slots }()
			if errs[i] = ctx.Err(); errs[i] != nil {
				return
			}
			u, err := s.Usage(ctx, sb.ID)
			switch {
			case err == nil:
				stats[i] = &Stat{Sandbox: sb, Usage: u}
			case !gone(err):
				errs[i] = err
			}
		})
	}
	wg.Wait()
	if err := errors.Join(errs...); err != nil {
		return nil, err
	}
	out := []Stat{}
	for _, st := range stats {
		if st != nil {
			out = append(out, *st)
		}
	}
	return out, nil
}

// gone tells whether err is that of a sandbox that has ended.
func gone(err error) bool {
	return errors.Is(err, errdefs.ErrNotFound) || errors.Is(err, errdefs.ErrConflict) || errors.Is(err, errdefs.ErrGuest)
}
