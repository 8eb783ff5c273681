package enginetest

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"io"
	"net"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"forkd.dev/forkd/internal/agentwire"
	"forkd.dev/forkd/internal/engine"
	"forkd.dev/forkd/internal/ident"
)

// suite is one run against one engine.
type suite struct {
	h    Harness
	d    engine.Driver
	base []engine.State // the capture of the booted machine: rootKey and rootFile are in it
}

// What the booted machine holds when it is captured.
const (
	rootKey  = "root_value"
	rootFile = "/root/enginetest-root"
	rootText = "from the root"
)

// Run checks the engine of h. The parts run in order and share one boot.
func Run(t *testing.T, h Harness) {
	s := &suite{h: h.withDefaults()}
	s.d = s.h.Open(t)
	defer func() { s.noError(t, "close the driver", s.d.Close()) }()
	if !t.Run("boot", s.testBoot) {
		return // there is nothing to fork
	}
	for _, part := range []struct {
		name string
		run  func(t *testing.T)
	}{
		{"probe", s.testProbe},
		{"compat", s.testCompat},
		{"forks diverge", s.testForksDiverge},
		{"pause", s.testPause},
		{"live capture", s.testLiveCapture},
		{"resumed", s.testResumed},
		{"captures in a row", s.testCapturesInARow},
		{"many captures", s.testManyCaptures},
		{"cold", s.testCold},
		{"chain", s.testChain},
		{"wrong parent", s.testWrongParent},
		{"damage", s.testDamage},
		{"kill", s.testKill},
		{"crash", s.testCrash},
		{"reap", s.testReap},
		{"cancel", s.testCancel},
		{"dial again", s.testDialAgain},
		{"fleet", s.testFleet},
		{"pool", s.testPool},
		{"adopt", s.testAdopt},
		{"adopt nothing", s.testAdoptNothing},
	} {
		t.Run(part.name, part.run)
		s.nothingLeft(t, part.name)
	}
}

// box is a machine with its guest.
type box struct {
	m     engine.Machine
	guest Guest
	chain []engine.State // it was restored from
}

// ctx is the time for one step.
func (s *suite) ctx(t testing.TB) context.Context { return within(t, s.h.Patience) }

func within(t testing.TB, d time.Duration) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), d)
	t.Cleanup(cancel)
	return ctx
}

func (s *suite) noError(t testing.TB, what string, err error) {
	t.Helper()
	if err != nil {
		t.Fatalf("%s: %v", what, err)
	}
}

// spec makes the directory of a new machine, which goes with the test.
func (s *suite) spec(t testing.TB) engine.Spec {
	t.Helper()
	id := ident.New(ident.Sandbox)
	dir := filepath.Join(s.h.Dir, id)
	s.noError(t, "make machine directory", os.Mkdir(dir, 0o711))
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), s.h.Patience)
		defer cancel()
		if err := s.d.Reap(ctx, id, dir); err != nil {
			t.Errorf("reap %s at the end: %v", id, err)
		}
		if err := os.RemoveAll(dir); err != nil {
			t.Errorf("remove machine directory: %v", err)
		}
	})
	return engine.Spec{ID: id, Dir: dir, Shape: s.h.Shape, Root: s.h.Root}
}

// restore makes a stopped machine of chain.
func (s *suite) restore(t testing.TB, chain []engine.State) engine.Machine {
	t.Helper()
	m, err := s.d.Restore(s.ctx(t), s.spec(t), chain)
	s.noError(t, "restore", err)
	return m
}

// fork makes a running machine of chain that has its identity.
func (s *suite) fork(t testing.TB, chain []engine.State) *box {
	t.Helper()
	b := &box{m: s.restore(t, chain), chain: chain}
	s.wake(t, b)
	return b
}

// wake lets a restored machine run and identifies it, in the order of the contract.
func (s *suite) wake(t testing.TB, b *box) {
	t.Helper()
	ctx := s.ctx(t)
	conn, err := b.m.DialAgent(ctx)
	s.noError(t, "dial agent", err)
	s.noError(t, "resume", b.m.Resume(ctx))
	b.guest = s.connect(t, conn)
	_, err = b.guest.VerdictFork(ctx, identity(b.m.ID()))
	s.noError(t, "give identity", err)
}

func (s *suite) connect(t testing.TB, conn net.Conn) Guest {
	t.Helper()
	g, err := s.h.Connect(s.ctx(t), conn)
	s.noError(t, "connect to agent", err)
	t.Cleanup(func() { _ = g.Close() })
	return g
}

func (s *suite) dial(t testing.TB, b *box) {
	t.Helper()
	conn, err := b.m.DialAgent(s.ctx(t))
	s.noError(t, "dial agent", err)
	b.guest = s.connect(t, conn)
}

func identity(id string) agentwire.Identity {
	random := func(n int) []byte {
		b := make([]byte, n)
		rand.Read(b)
		return b
	}
	now := time.Now()
	return agentwire.Identity{
		SandboxID: id, Hostname: id, MachineID: hex.EncodeToString(random(16)), BootID: "6f1c2d3e-4a5b-4c6d-8e7f-0123456789ab",
		Token: hex.EncodeToString(random(32)), Entropy: random(64), Reseed: agentwire.ReseedAll,
		Generation: uint64(now.UnixMicro()), HostTime: now,
	}
}

// capture stores the state of b and returns the chain that ends in it.
func (s *suite) capture(t testing.TB, b *box, after engine.After) []engine.State {
	t.Helper()
	ctx := s.ctx(t)
	s.noError(t, "prepare the guest", b.guest.Prepare(ctx, agentwire.Prepare{Sync: true}))
	s.noError(t, "commit", b.guest.Commit(ctx))
	_ = b.guest.Close()
	dir := s.artifactDir(t)
	res, err := b.m.Capture(ctx, engine.CaptureSpec{Dir: dir, Parent: b.chain, After: after})
	s.noError(t, "capture", err)
	s.checkCapture(t, dir, res)
	if after == engine.AfterEnd {
		s.ended(t, b.m)
	} else {
		s.dial(t, b)
		s.noError(t, "verdict source", b.guest.VerdictSource(ctx))
	}
	state := engine.State{ID: ident.New(ident.Snapshot), Dir: dir, Artifacts: res.Artifacts}
	return append(slices.Clone(b.chain), state)
}

func (s *suite) artifactDir(t testing.TB) string {
	t.Helper()
	dir, err := os.MkdirTemp(s.h.Dir, "capture-")
	s.noError(t, "make capture directory", err)
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	return dir
}

// checkCapture: the artifacts listed are the files that are there.
func (s *suite) checkCapture(t testing.TB, dir string, res engine.CaptureResult) {
	t.Helper()
	entries, err := os.ReadDir(dir)
	s.noError(t, "list artifacts", err)
	listed := map[string]bool{}
	for _, a := range res.Artifacts {
		listed[a.Name] = true
		if a.Kind == "" || a.Format == "" {
			t.Errorf("artifact %s has kind %q and format %q", a.Name, a.Kind, a.Format)
		}
	}
	for _, e := range entries {
		if !listed[e.Name()] {
			t.Errorf("capture left %s, which is not listed", e.Name())
		}
		delete(listed, e.Name())
	}
	for name := range listed {
		t.Errorf("artifact %s is listed but not there", name)
	}
	if res.Pause <= 0 {
		t.Errorf("capture paused the guest for %v", res.Pause)
	}
}

// ended waits until a machine has ended and checks that it says why.
func (s *suite) ended(t testing.TB, m engine.Machine) {
	t.Helper()
	select {
	case <-m.Done():
	case <-s.ctx(t).Done():
		t.Fatalf("machine %s did not end within %v", m.ID(), s.h.Patience)
	}
	if m.Reason() == "" {
		t.Errorf("machine %s ended without a reason", m.ID())
	}
	s.notListed(t, m.ID())
}

func (s *suite) notListed(t testing.TB, id string) {
	t.Helper()
	ids, err := s.d.Orphans(s.ctx(t))
	s.noError(t, "list machines", err)
	if slices.Contains(ids, id) {
		t.Errorf("machine %s still has a process", id)
	}
}

func (s *suite) nothingLeft(t *testing.T, part string) {
	ids, err := s.d.Orphans(s.ctx(t))
	if err != nil {
		t.Errorf("list machines: %v", err)
	}
	if len(ids) > 0 {
		t.Errorf("after %q there are machines: %v", part, ids)
	}
}

func (s *suite) kill(t testing.TB, b *box) {
	t.Helper()
	_ = b.guest.Close()
	s.noError(t, "kill", b.m.Kill(s.ctx(t)))
	s.ended(t, b.m)
}

// want checks a value in memory and the text of a file, where "" means not asked.
func (s *suite) want(t testing.TB, b *box, name, value, path, text string) {
	t.Helper()
	ctx := s.ctx(t)
	if name != "" {
		got, err := b.guest.Get(ctx, name)
		s.noError(t, "get "+name, err)
		if got != value {
			t.Errorf("machine %s has %s = %q, want %q", b.m.ID(), name, got, value)
		}
	}
	if path != "" {
		got, err := b.guest.ReadFile(ctx, path)
		s.noError(t, "read "+path, err)
		if got != text {
			t.Errorf("machine %s has %q in %s, want %q", b.m.ID(), got, path, text)
		}
	}
}

// put changes memory and disk of b.
func (s *suite) put(t testing.TB, b *box, name, value, path, text string) {
	t.Helper()
	ctx := s.ctx(t)
	s.noError(t, "set "+name, b.guest.Set(ctx, name, value))
	s.noError(t, "write "+path, b.guest.WriteFile(ctx, path, text))
}

// digests hashes all artifacts of chain.
func (s *suite) digests(t testing.TB, chain []engine.State) map[string]string {
	t.Helper()
	out := map[string]string{}
	for _, st := range chain {
		for _, a := range st.Artifacts {
			path := filepath.Join(st.Dir, a.Name)
			f, err := os.Open(path)
			s.noError(t, "open artifact", err)
			h := sha256.New()
			_, err = io.Copy(h, f)
			_ = f.Close()
			s.noError(t, "hash artifact", err)
			out[path] = hex.EncodeToString(h.Sum(nil))
		}
	}
	return out
}
