package enginetest

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"testing"
	"time"

	"forkd.dev/forkd/internal/agentwire"
	"forkd.dev/forkd/internal/engine"
	"forkd.dev/forkd/internal/errdefs"
	"forkd.dev/forkd/internal/ident"
)

// clockError is how far a guest's clock may be from the host's in this suite, which
// may share its processors with others.
const clockError = time.Second

// testForksDiverge: every fork sees the captured memory and disk, changes its own,
// and nobody sees the changes of another. The parent's files do not change.
func (s *suite) testForksDiverge(t *testing.T) {
	before := s.digests(t, s.base)
	boxes := []*box{s.fork(t, s.base), s.fork(t, s.base), s.fork(t, s.base)}
	for _, b := range boxes {
		s.want(t, b, rootKey, rootText, rootFile, rootText)
		s.checkClock(t, b)
		s.checkUsage(t, b.m)
	}
	for _, b := range boxes {
		s.put(t, b, rootKey, "of "+b.m.ID(), rootFile, "on "+b.m.ID())
	}
	for _, b := range boxes {
		s.want(t, b, rootKey, "of "+b.m.ID(), rootFile, "on "+b.m.ID())
	}
	if s.h.Inspect != nil {
		t.Run("inspect", func(t *testing.T) { s.h.Inspect(t, boxes[0].m, s.base) })
	}
	late := s.fork(t, s.base)
	s.want(t, late, rootKey, rootText, rootFile, rootText)
	for _, b := range append(boxes, late) {
		s.kill(t, b)
	}
	if after := s.digests(t, s.base); !maps.Equal(before, after) {
		t.Errorf("the parent's files changed: %v became %v", before, after)
	}
}

func (s *suite) checkClock(t *testing.T, b *box) {
	t.Helper()
	before := time.Now()
	now, err := b.guest.Now(s.ctx(t))
	s.noError(t, "read clock", err)
	if now.Before(before.Add(-clockError)) || now.After(time.Now().Add(clockError)) {
		t.Errorf("the clock of %s is %v away", b.m.ID(), now.Sub(before))
	}
}

// testLiveCapture: the source goes on, the child has the state of the instant.
func (s *suite) testLiveCapture(t *testing.T) {
	if s.lacks(t, LiveCapture) {
		return
	}
	source := s.fork(t, s.base)
	s.put(t, source, "instant", "at", "/root/instant", "at")
	chain := s.capture(t, source, engine.AfterResume)
	s.put(t, source, "instant", "later", "/root/instant", "later")
	child := s.fork(t, chain)
	s.want(t, child, "instant", "at", "/root/instant", "at")
	s.want(t, child, rootKey, rootText, rootFile, rootText)
	s.put(t, child, "instant", "child", "/root/instant", "child")
	s.want(t, source, "instant", "later", "/root/instant", "later")
	// The source can be captured again, against the same parent.
	again := s.fork(t, s.capture(t, source, engine.AfterResume))
	s.want(t, again, "instant", "later", "/root/instant", "later")
	for _, b := range []*box{source, child, again} {
		s.kill(t, b)
	}
}

// testResumed: a capture tells when its source goes on, before anything is written,
// and what is said then ends it without harm to the source.
func (s *suite) testResumed(t *testing.T) {
	if s.lacks(t, LiveCapture) {
		return
	}
	source := s.fork(t, s.base)
	s.put(t, source, "resumed", "at", "/root/resumed", "at")
	freeze := func() {
		t.Helper()
		s.noError(t, "prepare the guest", source.guest.Prepare(s.ctx(t), agentwire.Prepare{}))
		s.noError(t, "commit", source.guest.Commit(s.ctx(t)))
	}
	dir, told := s.artifactDir(t), 0
	spec := engine.CaptureSpec{Dir: dir, Parent: s.base, After: engine.AfterResume}
	spec.Resumed = func(ctx context.Context, res engine.CaptureResult) error {
		told++
		if res.Pause <= 0 || len(res.Artifacts) > 0 {
			t.Errorf("told %+v when the source goes on", res)
		}
		// The guest answers, and what it does now is not captured.
		return errors.Join(source.guest.VerdictSource(ctx), source.guest.Set(ctx, "resumed", "later"))
	}
	freeze()
	res, err := source.m.Capture(s.ctx(t), spec)
	s.noError(t, "capture", err)
	s.checkCapture(t, dir, res)
	if told != 1 {
		t.Errorf("told %d times that the source goes on", told)
	}
	child := s.fork(t, append(slices.Clone(s.base), engine.State{ID: ident.New(ident.Snapshot), Dir: dir, Artifacts: res.Artifacts}))
	s.want(t, child, "resumed", "at", "/root/resumed", "at")
	refused := errors.New("refused")
	spec.Dir = s.artifactDir(t)
	spec.Resumed = func(ctx context.Context, _ engine.CaptureResult) error {
		return errors.Join(source.guest.VerdictSource(ctx), refused)
	}
	freeze()
	if _, err := source.m.Capture(s.ctx(t), spec); !errors.Is(err, refused) {
		t.Errorf("capture whose caller refuses: error is %v", err)
	}
	s.want(t, source, "resumed", "later", "/root/resumed", "at")
	again := s.fork(t, s.capture(t, source, engine.AfterResume))
	s.want(t, again, "resumed", "later", "/root/resumed", "at")
	for _, b := range []*box{source, child, again} {
		s.kill(t, b)
	}
}

// testCapturesInARow: once a live capture is stored it is the parent of the next,
// and each child has the state of its own instant.
func (s *suite) testCapturesInARow(t *testing.T) {
	if s.lacks(t, LiveCapture) {
		return
	}
	source := s.fork(t, s.base)
	var chains [][]engine.State
	for _, v := range []string{"one", "two", "three"} {
		s.put(t, source, "step", v, "/root/step", v)
		chain := s.capture(t, source, engine.AfterResume)
		s.noError(t, "stored", source.m.Stored(s.ctx(t), chain[len(chain)-1].ID))
		source.chain = chain
		chains = append(chains, chain)
	}
	s.put(t, source, "step", "after", "/root/step", "after")
	if s.h.Inspect != nil {
		t.Run("inspect the source", func(t *testing.T) { s.h.Inspect(t, source.m, source.chain) })
	}
	for i, v := range []string{"one", "two", "three"} {
		child := s.fork(t, chains[i])
		s.want(t, child, "step", v, "/root/step", v)
		s.want(t, child, rootKey, rootText, rootFile, rootText)
		// A child of a small difference can be captured, too.
		s.put(t, child, "step", "grandchild", "/root/step", "grandchild")
		chain := s.capture(t, child, engine.AfterEnd)
		grandchild := s.fork(t, chain)
		s.want(t, grandchild, "step", "grandchild", "/root/step", "grandchild")
		s.kill(t, child)
		s.kill(t, grandchild)
	}
	s.want(t, source, "step", "after", "/root/step", "after")
	if _, err := source.m.Capture(s.ctx(t), engine.CaptureSpec{Dir: s.artifactDir(t), Parent: s.base, After: engine.AfterResume}); !errors.Is(err, errdefs.ErrInvalid) {
		t.Errorf("capture against an older parent: error is %v, want class invalid", err)
	}
	s.captureForgotten(t, source, chains)
	s.kill(t, source)
}

// testManyCaptures: a source can be captured on and on, stored or not; children of all
// depths have the state of their instant, and a state that was merged with some of its
// ancestors needs only the others.
func (s *suite) testManyCaptures(t *testing.T) {
	if s.lacks(t, LiveCapture) {
		return
	}
	const captures = 60
	source := s.fork(t, s.base)
	chains := make([][]engine.State, 0, captures)
	for i := range captures {
		v := strconv.Itoa(i)
		s.put(t, source, "many", v, "/root/many", v)
		if i%10 == 0 {
			s.noError(t, "write", source.guest.WriteFile(s.ctx(t), "/root/many-"+v, v))
		}
		chain := s.capture(t, source, engine.AfterResume)
		chains = append(chains, chain)
		if i%4 == 3 { // others are in no later one's chain
			s.noError(t, "stored", source.m.Stored(s.ctx(t), chain[len(chain)-1].ID))
			source.chain = chain
		}
	}
	if s.h.Inspect != nil {
		t.Run("inspect the source", func(t *testing.T) { s.h.Inspect(t, source.m, source.chain) })
	}
	look := func(what string, i int, chain []engine.State) {
		t.Helper()
		v := strconv.Itoa(i)
		t.Logf("%s of capture %d: a chain of %d", what, i, len(chain))
		child := s.fork(t, chain)
		s.want(t, child, "many", v, "/root/many", v)
		s.want(t, child, rootKey, rootText, "/root/many-0", "0")
		if i > 10 {
			s.want(t, child, "", "", "/root/many-10", "10")
		}
		s.kill(t, child)
	}
	for _, i := range []int{0, captures / 2, captures - 1} {
		look("a child", i, chains[i])
	}
	s.want(t, source, "many", strconv.Itoa(captures-1), "/root/many-0", "0")
	if c, ok := s.d.(engine.Compactor); ok {
		for _, keep := range []int{0, 1, len(chains[captures-1]) / 2} {
			look(fmt.Sprintf("a child of the merge of all but %d", keep), captures-1, s.merge(t, c, chains[captures-1], keep))
		}
	}
	s.kill(t, source)
}

// merge returns the chain of the last state of chain on top of the first keep.
func (s *suite) merge(t *testing.T, c engine.Compactor, chain []engine.State, keep int) []engine.State {
	t.Helper()
	before := s.digests(t, chain)
	dir := s.artifactDir(t)
	artifacts, err := c.Compact(s.ctx(t), engine.Compaction{Chain: chain, Keep: keep, Dir: dir, BytesPerSecond: 1 << 30})
	s.noError(t, "merge", err)
	s.checkCapture(t, dir, engine.CaptureResult{Artifacts: artifacts, Pause: 1})
	if after := s.digests(t, chain); !maps.Equal(before, after) {
		t.Error("merging changed what was merged")
	}
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	empty := s.artifactDir(t)
	if _, err := c.Compact(ctx, engine.Compaction{Chain: chain, Keep: keep, Dir: empty}); !errors.Is(err, context.Canceled) {
		t.Errorf("a cancelled merge: error is %v", err)
	}
	if left, err := os.ReadDir(empty); err != nil || len(left) > 0 {
		t.Errorf("a cancelled merge left %v, %v", left, err)
	}
	return append(slices.Clone(chain[:keep]), engine.State{ID: ident.New(ident.Snapshot), Dir: dir, Artifacts: artifacts})
}

// testCold: a machine that boots from the disk of a state has its files and none of its
// memory, and what is captured of it needs nothing else.
func (s *suite) testCold(t *testing.T) {
	c, ok := s.d.(engine.ColdBooter)
	if !ok {
		return
	}
	source := s.fork(t, s.base)
	s.put(t, source, "cold", "memory", "/root/cold", "disk")
	chain := s.capture(t, source, engine.AfterEnd)
	before := s.digests(t, chain)
	ctx := within(t, s.h.BootPatience)
	m, err := c.BootFrom(ctx, s.spec(t), chain)
	s.noError(t, "boot from a disk", err)
	b := &box{m: m}
	conn, err := m.DialAgent(ctx)
	s.noError(t, "dial agent", err)
	if b.guest, err = s.h.Connect(ctx, conn); err != nil {
		t.Fatalf("connect to agent of a booted machine: %v\nconsole: %s", err, s.console(t, m))
	}
	s.noError(t, "start guest", s.h.Start(ctx, b.guest))
	s.want(t, b, "", "", "/root/cold", "disk")
	s.want(t, b, "", "", rootFile, rootText)
	if v, err := b.guest.Get(ctx, "cold"); err == nil && v == "memory" {
		t.Error("it has the memory of the state")
	}
	if p := m.Parent(); p != "" {
		t.Errorf("its parent is %q", p)
	}
	s.put(t, b, "cold", "again", "/root/cold", "again")
	alone := s.capture(t, b, engine.AfterResume)
	if s.h.Inspect != nil {
		t.Run("inspect", func(t *testing.T) { s.h.Inspect(t, m, chain) })
	}
	child := s.fork(t, alone)
	s.want(t, child, "cold", "again", "/root/cold", "again")
	s.want(t, child, "", "", rootFile, rootText)
	if after := s.digests(t, chain); !maps.Equal(before, after) {
		t.Error("the state that was booted from has changed")
	}
	if _, err := c.BootFrom(ctx, s.spec(t), nil); !errors.Is(err, errdefs.ErrInvalid) {
		t.Errorf("boot from nothing: error is %v, want class invalid", err)
	}
	s.kill(t, b)
	s.kill(t, child)
}

// captureForgotten: when stored captures are deleted, the parent is what was before
// them, and a capture against that holds everything since.
func (s *suite) captureForgotten(t *testing.T, source *box, chains [][]engine.State) {
	t.Helper()
	for _, chain := range slices.Backward(chains) {
		last := chain[len(chain)-1]
		if got := source.m.Parent(); got != last.ID {
			t.Errorf("the parent is %q, want %q", got, last.ID)
		}
		s.d.Forget(last.ID)
		s.noError(t, "remove artifacts", os.RemoveAll(last.Dir))
	}
	source.chain = s.base
	child := s.fork(t, s.capture(t, source, engine.AfterResume))
	s.want(t, child, "step", "after", "/root/step", "after")
	s.want(t, child, rootKey, rootText, rootFile, rootText)
	s.kill(t, child)
}

// testChain: a fork of a fork of a fork holds what each level added, and what each
// level changed is as the last one left it.
func (s *suite) testChain(t *testing.T) {
	chain := s.base
	levels := []string{"one", "two", "three"}
	for _, level := range levels {
		b := s.fork(t, chain)
		s.put(t, b, "level_"+level, level, "/root/level-"+level, level)
		s.put(t, b, "deepest", level, "/root/deepest", level)
		chain = s.capture(t, b, engine.AfterEnd)
	}
	if len(chain) != len(levels)+1 {
		t.Fatalf("the chain has %d links", len(chain))
	}
	last := s.fork(t, chain)
	for _, level := range levels {
		s.want(t, last, "level_"+level, level, "/root/level-"+level, level)
	}
	s.want(t, last, "deepest", "three", "/root/deepest", "three")
	s.want(t, last, rootKey, rootText, rootFile, rootText)
	middle := s.fork(t, chain[:2])
	s.want(t, middle, "deepest", "one", "/root/deepest", "one")
	s.kill(t, last)
	s.kill(t, middle)
	for _, st := range chain[1:] {
		s.d.Forget(st.ID)
	}
	s.forgotten(t, chain)
}

// forgotten: what a driver forgot it reads again.
func (s *suite) forgotten(t *testing.T, chain []engine.State) {
	t.Helper()
	b := s.fork(t, chain)
	s.want(t, b, "deepest", "three", rootFile, rootText)
	s.kill(t, b)
	s.d.Forget("sn00000000000000000000") // never seen
}

// testWrongParent: a capture against a chain the machine does not come from is
// refused, and the machine goes on.
func (s *suite) testWrongParent(t *testing.T) {
	b := s.fork(t, s.base)
	stranger := slices.Clone(s.base)
	stranger[len(stranger)-1].ID = "sn00000000000000000001"
	for what, parent := range map[string][]engine.State{"no parent": nil, "another parent": stranger} {
		_, err := b.m.Capture(s.ctx(t), engine.CaptureSpec{Dir: s.artifactDir(t), Parent: parent, After: engine.AfterResume})
		if !errors.Is(err, errdefs.ErrInvalid) {
			t.Errorf("capture with %s: error is %v, want class invalid", what, err)
		}
		s.noError(t, "ping after a refused capture", b.guest.Ping(s.ctx(t)))
	}
	if _, err := s.d.Restore(s.ctx(t), s.spec(t), nil); !errors.Is(err, errdefs.ErrInvalid) {
		t.Errorf("restore of nothing: error is %v, want class invalid", err)
	}
	s.kill(t, b)
}

// testDamage: a restore of damaged state fails with a class and leaves no process.
func (s *suite) testDamage(t *testing.T) {
	for _, a := range s.base[len(s.base)-1].Artifacts {
		t.Run("missing "+a.Kind, func(t *testing.T) { s.damaged(t, a, nil) })
		if a.Kind == "disk" {
			continue // its format is the business of what runs the guest
		}
		t.Run("truncated "+a.Kind, func(t *testing.T) { s.damaged(t, a, truncate) })
		t.Run("overwritten "+a.Kind, func(t *testing.T) { s.damaged(t, a, overwrite) })
	}
	s.restored(t)
}

func truncate(f *os.File, size int64) error { return f.Truncate(size / 2) }

// overwrite destroys the beginning, where every format says what it is.
func overwrite(f *os.File, size int64) error {
	_, err := f.WriteAt(make([]byte, min(size, 512)), 0)
	return err
}

// damaged restores a copy of the base in which one artifact is damaged, or missing
// if damage is nil.
func (s *suite) damaged(t *testing.T, victim engine.Artifact, damage func(*os.File, int64) error) {
	last := s.base[len(s.base)-1]
	copied := last
	copied.ID, copied.Dir = "sn0000000000000000000d", s.artifactDir(t)
	for _, a := range last.Artifacts {
		from, to := filepath.Join(last.Dir, a.Name), filepath.Join(copied.Dir, a.Name)
		switch {
		case a.Name != victim.Name:
			s.noError(t, "link artifact", os.Link(from, to))
		case damage != nil:
			s.noError(t, "damage artifact", damageCopy(from, to, damage))
		}
	}
	spec := s.spec(t)
	m, err := s.d.Restore(s.ctx(t), spec, []engine.State{copied})
	if err == nil {
		_ = m.Kill(context.Background())
		t.Fatal("damaged state was restored")
	}
	t.Logf("the error is: %v", err)
	if c := errdefs.Class(err); c != errdefs.ErrCorrupt && c != errdefs.ErrNotFound {
		t.Errorf("error has class %v, want corrupt or not found: %v", c, err)
	}
	s.notListed(t, spec.ID)
	s.d.Forget(copied.ID)
}

func damageCopy(from, to string, damage func(*os.File, int64) error) error {
	in, err := os.Open(from)
	if err != nil {
		return err
	}
	defer in.Close()
	out, err := os.OpenFile(to, os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	defer out.Close()
	size, err := io.Copy(out, in)
	if err != nil {
		return err
	}
	return damage(out, size)
}
