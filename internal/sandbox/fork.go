package sandbox

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"sync"
	"time"

	"forkd.dev/forkd/internal/engine"
	"forkd.dev/forkd/internal/errdefs"
	"forkd.dev/forkd/internal/ident"
)

// MaxFork is the largest number of sandboxes one call can ask for.
const MaxFork = 1000

// Labels every fork gets.
const (
	labelParent = "forkd.parent" // snapshot id
	labelBatch  = "forkd.batch"  // id of the fork call
	labelIndex  = "forkd.index"  // 0 to n-1
)

// Fork makes f.N sandboxes of a snapshot. each, if not nil, is called once for
// every child as it becomes ready or fails, never concurrently and not after Fork
// returned. The items are ordered by index. An error means that no child of the
// call is left.
func (s *Service) Fork(ctx context.Context, f Fork, each func(ForkItem)) ([]ForkItem, error) {
	began := time.Now()
	if err := s.checkFork(&f); err != nil {
		return nil, err
	}
	ctx, done, err := s.begin(ctx)
	if err != nil {
		return nil, err
	}
	defer done()
	plan, err := s.plan(ctx, f)
	if err != nil {
		return nil, err
	}
	defer plan.release()
	room, err := s.admit(ctx, demand{what: "fork", n: f.N, wait: f.Wait, eachMiB: plan.reserveMiB(ctx), snapshot: s.poolable(f, plan.id)})
	if err != nil {
		return nil, err
	}
	defer room.release()
	s.warm.enter()
	defer s.warm.leave()
	b, err := s.newBatch(ctx, plan, f, began)
	if err != nil {
		return nil, err
	}
	b.room = room
	items := b.run(ctx, each)
	if plan.manifest.Labels[labelAnonymous] == "" && !f.Cold {
		s.keepPool(plan)
	}
	return b.settle(items, f.Partial)
}

func checkLabels(labels map[string]string) error {
	for k, v := range labels {
		if reserved(k) && k != builtinLabel {
			return errdefs.New(errdefs.ErrInvalid, "label %.80s: names that begin with forkd. are the daemon's own", k)
		}
		if err := ident.CheckLabel(k, v); err != nil {
			return err
		}
	}
	return nil
}

func (s *Service) checkFork(f *Fork) error {
	if err := checkInputs(f); err != nil {
		return err
	}
	if f.N < 1 || f.N > MaxFork {
		return errdefs.New(errdefs.ErrInvalid, "cannot fork %d sandboxes: n is not between 1 and %d", f.N, MaxFork)
	}
	if f.Name != "" && f.N != 1 {
		return errdefs.New(errdefs.ErrInvalid, "a name can be given to one sandbox only, not to %d", f.N)
	}
	if f.Name != "" {
		if err := ident.CheckTag(f.Name); err != nil {
			return fmt.Errorf("name of sandbox: %w", err)
		}
	}
	if err := checkLabels(f.Labels); err != nil {
		return err
	}
	if f.Engine != "" && f.Engine != s.cfg.Engine.Name() {
		return errdefs.WithHint(errdefs.New(errdefs.ErrInvalid, "there is no engine %q here", f.Engine),
			"this daemon runs engine %q", s.cfg.Engine.Name())
	}
	if f.Wait < 0 || f.Wait > MaxWait {
		return errdefs.New(errdefs.ErrInvalid, "cannot wait %v for room: 0 to %v are possible", f.Wait, MaxWait)
	}
	if _, ok := s.cfg.Engine.(engine.ColdBooter); f.Cold && !ok {
		return errdefs.New(errdefs.ErrUnsupported, "engine %s cannot boot from the disk of a snapshot", s.cfg.Engine.Name())
	}
	return s.checkLimits(f.limits())
}

// maxEnvBytes bounds what a fork is given: it travels in one agent message.
const maxEnvBytes = 48 << 10

func checkEnv(env map[string]string) error {
	total := 0
	for k, v := range env {
		if k == "" {
			return errdefs.New(errdefs.ErrInvalid, "an environment variable has no name")
		}
		for _, c := range []byte(k + v) {
			if c == 0 {
				return errdefs.New(errdefs.ErrInvalid, "environment variable %.40q contains a NUL byte", k)
			}
		}
		for _, c := range []byte(k) {
			if c == '=' {
				return errdefs.New(errdefs.ErrInvalid, "name of environment variable %.40q contains '='", k)
			}
		}
		total += len(k) + len(v) + 2
	}
	if total > maxEnvBytes {
		return errdefs.New(errdefs.ErrInvalid, "environment has %d bytes, more than %d", total, maxEnvBytes)
	}
	return nil
}

// batch is one fork call under way.
type batch struct {
	s        *Service
	plan     *plan
	req      Fork
	began    time.Time
	room     *room
	children []*child
}

// child is one sandbox of a batch.
type child struct {
	index   int
	machine engine.Machine // claimed from a pool, or nil
	link    *link          // likewise, if it is a warm one
	info    Sandbox
}

// newBatch decides the ids of the children and journals them, all in one
// transaction, before anything is created for them.
func (s *Service) newBatch(ctx context.Context, p *plan, f Fork, began time.Time) (*batch, error) {
	b := &batch{s: s, plan: p, req: f, began: began}
	batchID := ident.New("fb")
	for i := range f.N {
		c := &child{index: i}
		if s.poolable(f, p.id) != "" {
			c.machine, c.link = s.claim(p.id)
		}
		id := ident.New(ident.Sandbox)
		if c.machine != nil {
			id = c.machine.ID()
		}
		c.info = Sandbox{
			ID: id, Name: f.Name, State: Creating, SnapshotID: p.id, SnapshotTag: p.tag,
			Engine: s.cfg.Engine.Name(), Isolation: p.isolation, Shape: p.manifest.Shape,
			Labels: childLabels(withLabels(withLabels(p.labels, f.Labels), f.input(i).Labels), p.id, batchID, i), CreatedAt: began,
			MemoryLimitMiB: f.MemoryLimitMiB, CPULimitPercent: f.CPULimitPercent, PIDsLimit: f.PIDsLimit,
			HoldsSecrets: p.manifest.HoldsSecrets || len(f.Secrets) > 0,
		}
		c.info.Timing.Pool = poolOf(c)
		b.children = append(b.children, c)
	}
	if err := b.insert(ctx); err != nil {
		b.abandon()
		return nil, err
	}
	return b, nil
}

func childLabels(given map[string]string, parent, batchID string, index int) map[string]string {
	labels := make(map[string]string, len(given)+3)
	for k, v := range given {
		labels[k] = v
	}
	labels[labelParent], labels[labelBatch], labels[labelIndex] = parent, batchID, strconv.Itoa(index)
	return labels
}

// abandon gives up a batch of which nothing but claimed machines exists.
func (b *batch) abandon() {
	for _, c := range b.children {
		if c.machine == nil {
			continue
		}
		if c.link != nil {
			c.link.close()
		}
		if err := b.s.discard(c.info.ID); err != nil {
			b.s.cfg.Log("%v", err)
		}
	}
}

// run launches all children and waits for all of them. Where one failure fails
// the call, the first one stops the rest.
func (b *batch) run(ctx context.Context, each func(ForkItem)) []ForkItem {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	items := make([]ForkItem, len(b.children))
	var wg sync.WaitGroup
	var tell sync.Mutex
	for i, c := range b.children {
		wg.Go(func() {
			info, err := b.launch(ctx, c)
			items[i] = ForkItem{Index: i, Sandbox: info, Err: err}
			if err != nil && !b.req.Partial {
				cancel()
			}
			if each != nil {
				tell.Lock()
				defer tell.Unlock()
				each(items[i])
			}
		})
	}
	wg.Wait()
	return items
}

// settle decides what a finished batch is worth.
func (b *batch) settle(items []ForkItem, partial bool) ([]ForkItem, error) {
	var first error
	ok := 0
	for _, it := range items {
		switch {
		case it.Err == nil:
			ok++
		case first == nil || (isCancel(first) && !isCancel(it.Err)):
			first = fmt.Errorf("child %d of %d: %w", it.Index, len(items), it.Err)
		}
	}
	if first == nil || (partial && ok > 0) {
		return items, nil
	}
	var errs []error
	for _, it := range items {
		if it.Err != nil {
			continue
		}
		ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
		if err := b.s.Kill(ctx, it.Sandbox.ID); err != nil && !errors.Is(err, errdefs.ErrNotFound) {
			errs = append(errs, err)
		}
		cancel()
	}
	return nil, errors.Join(append([]error{fmt.Errorf("fork %s: %w", b.plan.name(), first)}, errs...)...)
}

func isCancel(err error) bool {
	return errors.Is(err, context.Canceled) || errors.Is(err, errdefs.ErrCanceled)
}
