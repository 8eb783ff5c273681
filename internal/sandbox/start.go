package sandbox

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"maps"
	"regexp"
	"strconv"
	"strings"
	"time"

	"forkd.dev/forkd/internal/agentwire"
	"forkd.dev/forkd/internal/errdefs"
	"forkd.dev/forkd/internal/guest"
	"forkd.dev/forkd/internal/store/snapshot"
)

const (
	defaultReadyTimeout = 60 * time.Second
	maxReadyTimeout     = 24 * time.Hour
	// readyEvery is how often the conditions of readiness are looked at.
	readyEvery = 250 * time.Millisecond
	// readyTry bounds one look at them.
	readyTry = 30 * time.Second
	// settleTime is how long a program without a condition has to live to count as
	// started.
	settleTime = 2 * time.Second
	// maxStartLogKept bounds what is kept of a log while a line of it is looked for.
	maxStartLogKept = 64 << 10
)

// checkStart checks a start and fills in its defaults.
func checkStart(st *Start) error {
	if st == nil {
		return nil
	}
	invalid := func(format string, args ...any) error {
		return errdefs.New(errdefs.ErrInvalid, "start: "+format, args...)
	}
	switch {
	case st.Command == "":
		return invalid("there is no command")
	case st.ReadyPort < 0 || st.ReadyPort > 65535:
		return invalid("ready port %d is not between 1 and 65535", st.ReadyPort)
	case st.ReadyTimeout < 0 || st.ReadyTimeout > maxReadyTimeout:
		return invalid("ready time-out %v is not between 0 and %v", st.ReadyTimeout, maxReadyTimeout)
	case strings.ContainsRune(st.Command+st.Ready+st.Cwd+st.User, 0):
		return invalid("a text holds a NUL")
	}
	for k, v := range st.Env {
		if k == "" || strings.ContainsAny(k, "=\x00") || strings.ContainsRune(v, 0) {
			return invalid("environment variable %.80q has no valid name or value", k)
		}
	}
	if _, err := regexp.Compile(st.ReadyLog); err != nil {
		return invalid("ready log %.80q is no regular expression: %v", st.ReadyLog, err)
	}
	if st.ReadyTimeout == 0 {
		st.ReadyTimeout = defaultReadyTimeout
	}
	return nil
}

// starting is the start of a program in the builder machine.
type starting struct {
	b       *builder
	st      Start
	program *guest.Started
	pattern *regexp.Regexp
	begin   time.Time

	offset int64  // of its log, read so far
	line   []byte // its last, unfinished line
	seen   bool   // a line matched
	forked bool   // the command has ended well; what it left behind runs
}

// start starts the program, if there is one, and waits until it is ready. If that
// fails, the last lines of its output are the last of the build's log.
func (b *builder) start(ctx context.Context) error {
	if b.req.Start == nil {
		return nil
	}
	s := &starting{b: b, st: *b.req.Start, pattern: regexp.MustCompile(b.req.Start.ReadyLog)}
	b.log.step("start: %s", s.st.Command)
	err := b.call(ctx, callSlack, func(ctx context.Context, a Agent) (err error) {
		s.program, err = guest.Start(ctx, a, s.command(s.st.Command))
		return err
	})
	if err != nil {
		return fmt.Errorf("start command %q: %w", s.st.Command, err)
	}
	defer s.program.Leave()
	s.begin = time.Now()
	err = b.ticking("waiting until the started program is ready", func() error { return s.await(ctx) })
	if err != nil {
		s.showLog(ctx)
		return err
	}
	b.log.step("ready after %.1f s", time.Since(s.begin).Seconds())
	return nil
}

func (s *starting) command(text string) agentwire.ExecRequest {
	return agentwire.ExecRequest{Argv: []string{"/bin/sh", "-c", text}, Env: s.st.Env, Cwd: s.st.Cwd, User: s.st.User}
}

// await looks at the conditions until all hold, the program ends or time is up.
func (s *starting) await(ctx context.Context) error {
	late := time.NewTimer(s.st.ReadyTimeout)
	defer late.Stop()
	again := time.NewTicker(readyEvery)
	defer again.Stop()
	for {
		ready, err := s.ready(ctx)
		if err != nil {
			return err
		}
		if err := s.ended(); err != nil {
			return err
		}
		if ready {
			return nil
		}
		select {
		case <-again.C:
		case <-late.C:
			return errdefs.WithHint(errdefs.New(errdefs.ErrTimeout, "start command %q was not ready within %v: %s", s.st.Command, s.st.ReadyTimeout, s.unmet()),
				"wait longer with --ready-timeout, or check the condition")
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// ended tells whether the program has ended in a way that leaves nothing to wait
// for. A command that ends well may have started what becomes ready.
func (s *starting) ended() error {
	if s.forked {
		return nil
	}
	select {
	case code, told := <-s.program.Exited():
		if !told {
			return errdefs.New(errdefs.ErrGuest, "start command %q: the connection to the guest was lost", s.st.Command)
		}
		if s.forked = code == 0 && s.conditional(); !s.forked {
			return errdefs.New(errdefs.ErrInvalid, "start command %q ended with exit code %d before it was ready", s.st.Command, code)
		}
	default:
	}
	return nil
}

func (s *starting) conditional() bool {
	return s.st.Ready != "" || s.st.ReadyLog != "" || s.st.ReadyPort != 0
}

// unmet names the conditions.
func (s *starting) unmet() string {
	var out []string
	if s.st.ReadyLog != "" && !s.seen {
		out = append(out, fmt.Sprintf("no line of its output matches %q", s.st.ReadyLog))
	}
	if s.st.ReadyPort != 0 {
		out = append(out, "port "+strconv.Itoa(s.st.ReadyPort)+" is asked")
	}
	if s.st.Ready != "" {
		out = append(out, fmt.Sprintf("%q is asked", s.st.Ready))
	}
	return strings.Join(out, ", ")
}

// ready looks once whether all conditions hold.
func (s *starting) ready(ctx context.Context) (bool, error) {
	if s.st.ReadyLog != "" && !s.seen {
		if err := s.readLog(ctx); err != nil || !s.seen {
			return false, err
		}
	}
	if s.st.ReadyPort != 0 {
		if open, err := s.portOpen(ctx); err != nil || !open {
			return false, err
		}
	}
	if s.st.Ready == "" {
		return s.conditional() || time.Since(s.begin) >= min(settleTime, s.st.ReadyTimeout/2), nil
	}
	var res agentwire.ExecResult
	req := s.command(s.st.Ready)
	req.Timeout = min(readyTry, s.st.ReadyTimeout)
	err := s.b.call(ctx, req.Timeout+callSlack, func(ctx context.Context, a Agent) (err error) {
		res, err = a.Exec(ctx, req)
		return err
	})
	if err != nil {
		return false, fmt.Errorf("ready command %q: %w", s.st.Ready, err)
	}
	return res.ExitCode == 0 && !res.TimedOut, nil
}

// portOpen tells whether somebody listens. A refusal is no failure of the call,
// which would end the connection to the agent.
func (s *starting) portOpen(ctx context.Context) (open bool, err error) {
	err = s.b.call(ctx, readyTry, func(ctx context.Context, a Agent) error {
		conn, err := a.OpenStream(ctx, agentwire.StreamTCP+strconv.Itoa(s.st.ReadyPort))
		switch {
		case err == nil:
			open = true
			return conn.Close()
		case errors.Is(err, errdefs.ErrUnavailable):
			return nil
		}
		return err
	})
	return open, err
}

// readLog looks for the line in what came since the last time.
func (s *starting) readLog(ctx context.Context) error {
	for {
		var part []byte
		err := s.b.call(ctx, readyTry, func(ctx context.Context, a Agent) (err error) {
			part, err = guest.StartLog(ctx, a, s.offset)
			return err
		})
		if err != nil {
			return err
		}
		if len(part) == 0 {
			return nil
		}
		s.offset += int64(len(part))
		s.take(part)
		if s.seen || len(part) < agentwire.StartLogChunk {
			return nil
		}
	}
}

func (s *starting) take(part []byte) {
	s.line = append(s.line, part...)
	for !s.seen {
		line, rest, found := bytes.Cut(s.line, []byte("\n"))
		if s.seen = s.pattern.Match(line); !found {
			break
		}
		s.line = rest
	}
	if over := len(s.line) - maxStartLogKept; over > 0 {
		s.line = s.line[over:]
	}
}

// showLog adds the end of the program's output to the build's log.
func (s *starting) showLog(ctx context.Context) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), callSlack)
	defer cancel()
	var end []byte
	for offset := int64(0); ; {
		var part []byte
		err := s.b.call(ctx, readyTry, func(ctx context.Context, a Agent) (err error) {
			part, err = guest.StartLog(ctx, a, offset)
			return err
		})
		if err != nil || len(part) == 0 {
			break
		}
		offset += int64(len(part))
		if end = append(end, part...); len(end) > maxStartLogKept {
			end = end[len(end)-maxStartLogKept:]
		}
		if len(part) < agentwire.StartLogChunk {
			break
		}
	}
	if len(end) == 0 {
		s.b.log.output([]byte("(the started program printed nothing)\n"))
		return
	}
	s.b.log.output([]byte(lastLines(string(end), errorLines) + "\n"))
}

// startedProgram tells whether a started program runs in the machine, also one of
// an earlier snapshot.
func (b *builder) startedProgram() bool {
	return b.req.Start != nil || b.parent != nil && b.s.runsProgram(b.parent.id)
}

// runsProgram tells whether a program was started for a snapshot or one of its ancestors.
func (s *Service) runsProgram(id string) bool {
	all := map[string]snapshot.Manifest{}
	for _, m := range s.cfg.Store.List() {
		all[m.ID] = m
	}
	for {
		m, ok := all[id]
		if !ok {
			return false
		}
		if m.Recipe.Start != nil {
			return true
		}
		delete(all, id) // a cycle would be damage, and must end too
		id = m.ParentID
	}
}

// recipe is how the snapshot is made.
func (b *builder) recipe() snapshot.Recipe {
	r := snapshot.Recipe{Image: b.req.Image, From: b.req.From, Warm: b.req.Warm, Exec: b.req.Exec, AllowHosts: b.req.AllowHosts}
	if b.files != nil {
		r.Files = b.files.digest
	}
	if st := b.req.Start; st != nil {
		r.Start = &snapshot.Start{
			Command: st.Command, Ready: st.Ready, ReadyPort: st.ReadyPort, ReadyLog: st.ReadyLog,
			ReadyTimeout: st.ReadyTimeout.Seconds(), Env: maps.Clone(st.Env), Cwd: st.Cwd, User: st.User,
		}
	}
	return r
}

func recipeOf(r snapshot.Recipe) Recipe {
	out := Recipe{Image: r.Image, From: r.From, Warm: r.Warm, Exec: r.Exec, AllowHosts: r.AllowHosts, Files: r.Files}
	if st := r.Start; st != nil {
		out.Start = &Start{
			Command: st.Command, Ready: st.Ready, ReadyPort: st.ReadyPort, ReadyLog: st.ReadyLog,
			ReadyTimeout: time.Duration(st.ReadyTimeout * float64(time.Second)), Env: st.Env, Cwd: st.Cwd, User: st.User,
		}
	}
	return out
}
