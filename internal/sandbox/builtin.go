package sandbox

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"forkd.dev/forkd/internal/errdefs"
	"forkd.dev/forkd/internal/image"
)

// PyBase is the built-in snapshot: Debian with a warmed Python and numpy.
const PyBase = "py-base"

// pythonImage is the built-in image behind it.
const pythonImage = "python"

// pyBaseWarm is what the runner of py-base has done before it is captured: the
// modules whose first use is slow under emulation. Not asyncio: it brings OpenSSL
// in, whose generator every fork would then have to reseed, used or not.
const pyBaseWarm = "import numpy, json, random, uuid, secrets, tempfile, traceback\n" +
	"numpy.random.rand(4).sum(); json.dumps({}); uuid.uuid4(); random.random()\n"

// builtinLabel marks the snapshots that are made by themselves.
const builtinLabel = "forkd.builtin"

func isBuiltin(ref string) bool { return ref == PyBase }

// builtinImages are the images that are built when they are first named.
var builtinImages = map[string][]string{
	pythonImage: {"python3", "python3-numpy", "python3-pip"},
}

// ensureBuiltin makes the built-in snapshot unless it exists. Concurrent callers
// share one build, which goes on as long as one of them waits.
func (s *Service) ensureBuiltin(ctx context.Context, name string, progress Progress) (string, error) {
	return s.builds.do(ctx, "snapshot "+name, progress, func(ctx context.Context, tell Progress) (string, error) {
		id, _, err := s.resolveSnapshot(ctx, name)
		if err == nil && !s.foreign(ctx, id) && s.spoiled(ctx, id) {
			sn, err := s.rebuild(ctx, id, name, tell)
			return sn.ID, err
		}
		// Another engine's stays as it is: a tag is taken within its engine only.
		if !errors.Is(err, errdefs.ErrNotFound) && (err != nil || !s.foreign(ctx, id)) {
			return id, err
		}
		sn, err := s.CreateSnapshot(ctx, CreateSnapshot{
			Tag: name, Image: pythonImage, Warm: pyBaseWarm,
			Labels: map[string]string{builtinLabel: s.builtinMark()},
		}, tell)
		return sn.ID, err
	})
}

// builtinMark is the value of the label of a built-in: the agent it holds.
func (s *Service) builtinMark() string {
	if s.cfg.AgentBuild == "" {
		return "true"
	}
	return s.cfg.AgentBuild
}

// Prepare makes a built-in ahead of its first use and fills its pool.
func (s *Service) Prepare(ctx context.Context, name string, progress Progress) error {
	if !isBuiltin(name) {
		return errdefs.WithHint(errdefs.New(errdefs.ErrInvalid, "%q is no built-in snapshot", name), "there is %s", PyBase)
	}
	p, err := s.plan(ctx, Fork{Snapshot: name, Progress: progress})
	if err != nil {
		return err
	}
	defer p.release()
	s.keepPool(p)
	return nil
}

// imageFor returns the image that ref means, building it if it is a built-in.
func (s *Service) imageFor(ctx context.Context, ref string, progress Progress) (Image, error) {
	img, err := s.cfg.Images.Get(ref)
	packages, builtin := builtinImages[ref]
	if !errors.Is(err, errdefs.ErrNotFound) || !builtin {
		return fromImage(img), err
	}
	id, err := s.builds.do(ctx, "image "+ref, progress, func(ctx context.Context, tell Progress) (string, error) {
		if img, err := s.cfg.Images.Get(ref); err == nil {
			return img.ID, nil
		}
		img, err := s.buildImage(ctx, image.BuildSpec{Name: ref, Packages: packages, Builtin: true}, tell)
		return img.ID, err
	})
	if err != nil {
		return Image{}, fmt.Errorf("build image %s: %w", ref, err)
	}
	img, err = s.cfg.Images.Get(id)
	return fromImage(img), err
}

// flights lets concurrent callers share one long operation, which ends early only
// when the last of them has gone.
type flights struct {
	mu sync.Mutex
	// +checklocks:mu
	running map[string]*flight
	// +checklocks:mu
	closed bool
	group  sync.WaitGroup
}

type flight struct {
	cancel context.CancelFunc
	done   chan struct{}
	result string
	err    error

	mu sync.Mutex
	// +checklocks:mu
	waiting int
	// +checklocks:mu
	listeners map[*Progress]Progress
}

func (f *flight) tell(step string, fraction float64) {
	f.mu.Lock()
	listeners := make([]Progress, 0, len(f.listeners))
	for _, l := range f.listeners {
		listeners = append(listeners, l)
	}
	f.mu.Unlock()
	for _, l := range listeners {
		l(step, fraction)
	}
}

// do joins the operation key or starts it with fn.
func (fs *flights) do(ctx context.Context, key string, progress Progress, fn func(context.Context, Progress) (string, error)) (string, error) {
	f, err := fs.join(key, fn)
	if err != nil {
		return "", err
	}
	f.mu.Lock()
	if progress != nil {
		f.listeners[&progress] = progress
	}
	f.mu.Unlock()
	defer func() {
		f.mu.Lock()
		delete(f.listeners, &progress)
		f.waiting--
		last := f.waiting == 0
		f.mu.Unlock()
		if last {
			f.cancel()
		}
	}()
	select {
	case <-f.done:
		return f.result, f.err
	case <-ctx.Done():
		return "", fmt.Errorf("wait for %s: %w", key, ctx.Err())
	}
}

func (fs *flights) join(key string, fn func(context.Context, Progress) (string, error)) (*flight, error) {
	fs.mu.Lock()
	defer fs.mu.Unlock()
	if fs.closed {
		return nil, errdefs.New(errdefs.ErrUnavailable, "the daemon is shutting down")
	}
	var before <-chan struct{}
	if f := fs.running[key]; f != nil {
		f.mu.Lock()
		defer f.mu.Unlock()
		if f.waiting > 0 {
			f.waiting++
			return f, nil
		}
		// Its last waiter left, so it is being cancelled: a new one starts after it.
		before = f.done
	}
	ctx, cancel := context.WithCancel(context.Background())
	f := &flight{cancel: cancel, done: make(chan struct{}), waiting: 1, listeners: map[*Progress]Progress{}}
	if fs.running == nil {
		fs.running = map[string]*flight{}
	}
	fs.running[key] = f
	fs.group.Go(func() {
		defer close(f.done)
		if before != nil {
			<-before
		}
		f.result, f.err = fn(ctx, f.tell)
		fs.mu.Lock()
		defer fs.mu.Unlock()
		if fs.running[key] == f {
			delete(fs.running, key)
		}
	})
	return f, nil
}

// close cancels all operations and waits for them.
func (fs *flights) close() {
	fs.mu.Lock()
	fs.closed = true
	for _, f := range fs.running {
		f.cancel()
	}
	fs.mu.Unlock()
	fs.group.Wait()
}
