package sandbox

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	"forkd.dev/forkd/internal/errdefs"
)

// LogKind says which log of an object is meant.
type LogKind string

// The logs there are.
const (
	LogAny     LogKind = ""        // the console of a sandbox, else the build log
	LogConsole LogKind = "console" // what a sandbox's kernel printed
	LogBuild   LogKind = "build"   // how a snapshot or an image was made
)

// LogRequest asks for a log.
type LogRequest struct {
	Ref  string // of a sandbox, a snapshot or an image; or the name of one being built
	Kind LogKind
	// Follow goes on with what comes, until the sandbox or build has ended.
	Follow bool
}

// consolePoll is how often a followed console is looked at: it announces nothing.
const consolePoll = 500 * time.Millisecond

// Logs passes a log to write piece by piece. It ends with the log, with ctx, or
// when write fails. What a guest printed may hold anything.
func (s *Service) Logs(ctx context.Context, req LogRequest, write func([]byte) error) error {
	switch req.Kind {
	case LogConsole:
		e, err := s.resolve(req.Ref)
		if err != nil {
			return err
		}
		return s.consoleLog(ctx, e, req.Follow, write)
	case LogBuild:
		return s.buildLog(ctx, req, write)
	case LogAny:
		e, err := s.resolve(req.Ref)
		if err == nil {
			return s.consoleLog(ctx, e, req.Follow, write)
		}
		if !errors.Is(err, errdefs.ErrNotFound) {
			return err
		}
		return s.buildLog(ctx, req, write)
	}
	return errdefs.New(errdefs.ErrInvalid, "there is no log %.40q: console and build are logs", req.Kind)
}

func (s *Service) consoleLog(ctx context.Context, e *entry, follow bool, write func([]byte) error) error {
	info := e.snapshot()
	if e.machine == nil || !info.State.living() {
		return errdefs.WithHint(errdefs.New(errdefs.ErrConflict, "sandbox %s has ended, and its console with it: %s", info.ID, info.Reason),
			"follow the console while it lives: forkd logs -f %s", info.ID)
	}
	tick := time.NewTicker(consolePoll)
	defer tick.Stop()
	var before []byte
	for {
		now, err := readConsole(e)
		if err != nil {
			if !e.alive() && before != nil {
				return nil
			}
			return fmt.Errorf("sandbox %s: %w", info.ID, err)
		}
		if news := newPart(before, now); len(news) > 0 {
			if err := write(news); err != nil {
				return err
			}
		}
		before = now
		if !follow {
			return nil
		}
		select {
		case <-tick.C:
		case <-e.machine.Done():
			return nil
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// maxConsole bounds what is taken of a console.
const maxConsole = 1 << 20

func readConsole(e *entry) ([]byte, error) {
	r, err := e.machine.Console()
	if err != nil {
		return nil, err
	}
	defer r.Close()
	b, err := io.ReadAll(io.LimitReader(r, maxConsole))
	if err != nil {
		return nil, fmt.Errorf("read console: %w", err)
	}
	return b, nil
}

// newPart returns what now has after before. A console keeps only its end, so the
// beginning of before may be gone from now.
func newPart(before, now []byte) []byte {
	if bytes.HasPrefix(now, before) {
		return now[len(before):]
	}
	// The end of before, long enough not to stand in now by chance.
	mark := before[len(before)-min(len(before), 1<<10):]
	if at := bytes.LastIndex(now, mark); at >= 0 {
		return now[at+len(mark):]
	}
	return now
}

func (s *Service) buildLog(ctx context.Context, req LogRequest, write func([]byte) error) error {
	if l := s.logs.find(req.Ref); l != nil {
		return l.copy(ctx, req.Follow, write)
	}
	id, err := s.builtObject(ctx, req.Ref)
	if err != nil {
		return err
	}
	b, err := s.logs.read(id)
	if err != nil || len(b) == 0 {
		return err
	}
	return write(b)
}

// builtObject returns the id of the snapshot or image that ref means.
func (s *Service) builtObject(ctx context.Context, ref string) (string, error) {
	id, _, err := s.resolveSnapshot(ctx, ref)
	if err == nil || !errors.Is(err, errdefs.ErrNotFound) {
		return id, err
	}
	img, imageErr := s.cfg.Images.Get(ref)
	if imageErr == nil {
		return img.ID, nil
	}
	if !errors.Is(imageErr, errdefs.ErrNotFound) {
		return "", imageErr
	}
	return "", errdefs.WithHint(errdefs.New(errdefs.ErrNotFound, "there is no sandbox, snapshot or image %q, and none of that name is being built", ref),
		"list them with: forkd ls, forkd snapshot ls, forkd image ls")
}

// copy passes on a log under way.
func (l *buildLog) copy(ctx context.Context, follow bool, write func([]byte) error) error {
	offset := 0
	for {
		b, total, more, changed := l.since(offset)
		if len(b) > 0 {
			if err := write(b); err != nil {
				return err
			}
		}
		offset = total
		if !follow || !more {
			return nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}
