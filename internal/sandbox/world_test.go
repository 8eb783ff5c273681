package sandbox

import (
	"context"
	"errors"
	"flag"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"sync"
	"testing"
	"time"

	"forkd.dev/forkd/internal/agentwire"
	"forkd.dev/forkd/internal/engine"
	"forkd.dev/forkd/internal/engine/fake"
	"forkd.dev/forkd/internal/errdefs"
	"forkd.dev/forkd/internal/ident"
	"forkd.dev/forkd/internal/image"
	"forkd.dev/forkd/internal/store/metadata"
	"forkd.dev/forkd/internal/store/snapshot"
)

// TestMain fails if goroutines are left when all tests have cleaned up. While it
// fuzzes, the testing package keeps goroutines of its own.
func TestMain(m *testing.M) {
	before := runtime.NumGoroutine()
	code := m.Run()
	if f := flag.Lookup("test.fuzz"); f != nil && f.Value.String() != "" {
		os.Exit(code)
	}
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for range 250 {
		if runtime.NumGoroutine() <= before {
			break
		}
		<-tick.C
	}
	if n := runtime.NumGoroutine(); n > before && code == 0 {
		buf := make([]byte, 1<<20)
		os.Stderr.WriteString("goroutines are left:\n" + string(buf[:runtime.Stack(buf, true)]) + "\n")
		code = 1
	}
	os.Exit(code)
}

const patience = 20 * time.Second

// world is a host with one data directory and the daemon that has it.
type world struct {
	t     *testing.T
	data  string
	host  *fake.Registry
	build string        // of the engine; "" is the fake's own
	cfg   func(*Config) // changes the service's configuration; may be nil

	images *fakeImages
	script script

	journal *metadata.DB
	store   *snapshot.Store
	driver  *fake.Driver
	svc     *Service
	engine  string // name of the engine; "" is the fake one's own
}

// script is what goes wrong. Its hooks are called without its lock.
type script struct {
	mu    sync.Mutex
	fault func(op fake.Op, id string) error
	guest func(id string) fake.GuestFaults
	step  func(snapshot.Step, string) error
	write func(metadata.Step) error
}

func (s *script) onWrite(fn func(metadata.Step) error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.write = fn
}

func (s *script) onFault(fn func(op fake.Op, id string) error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.fault = fn
}

func (s *script) onGuest(fn func(id string) fake.GuestFaults) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.guest = fn
}

func (s *script) onStep(fn func(snapshot.Step, string) error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.step = fn
}

// newWorld starts a daemon over an empty data directory. At the end of the test it is
// closed and nothing but snapshots may be left.
func newWorld(t *testing.T, cfg func(*Config)) *world {
	t.Helper()
	w := &world{t: t, data: t.TempDir(), host: fake.NewRegistry(), cfg: cfg}
	w.images = newFakeImages(t, w.data)
	w.open()
	t.Cleanup(w.finish)
	return w
}

// open starts a daemon as `forkd serve` does.
func (w *world) open() {
	w.t.Helper()
	if err := w.tryOpen(context.Background()); err != nil {
		w.t.Fatal(err)
	}
}

func (w *world) tryOpen(ctx context.Context) (err error) {
	if w.journal, err = metadata.Open(context.Background(), metadata.Config{Dir: w.data, Failpoint: func(step metadata.Step) error {
		w.script.mu.Lock()
		fn := w.script.write
		w.script.mu.Unlock()
		if fn == nil {
			return nil
		}
		return fn(step)
	}}); err != nil {
		return err
	}
	w.store, err = snapshot.Open(snapshot.Config{Dir: filepath.Join(w.data, "snapshots"), Failpoint: func(step snapshot.Step, path string) error {
		w.script.mu.Lock()
		fn := w.script.step
		w.script.mu.Unlock()
		if fn == nil {
			return nil
		}
		return fn(step, path)
	}})
	if err != nil {
		return err
	}
	w.driver = fake.New(fake.Config{
		Name: w.engine, Registry: w.host, Installation: w.journal.Installation(), Isolation: engine.IsolationEmulated, Build: w.build,
		Fault: func(op fake.Op, id string) error {
			w.script.mu.Lock()
			fn := w.script.fault
			w.script.mu.Unlock()
			if fn == nil {
				return nil
			}
			return fn(op, id)
		},
		Guest: func(id string) fake.GuestFaults {
			w.script.mu.Lock()
			fn := w.script.guest
			w.script.mu.Unlock()
			if fn == nil {
				return fake.GuestFaults{}
			}
			return fn(id)
		},
	})
	c := Config{Dir: w.machines(), Engine: w.driver, Images: w.images, Store: w.store, Journal: w.journal, Settle: -1, Connect: connectFake, Log: w.t.Logf}
	if w.cfg != nil {
		w.cfg(&c)
	}
	w.svc, err = New(ctx, c)
	return err
}

func connectFake(ctx context.Context, conn net.Conn) (Agent, error) {
	a, err := fake.Connect(ctx, conn)
	if err != nil {
		return nil, err
	}
	return a, nil
}

func (w *world) machines() string { return filepath.Join(w.data, "sandboxes") }

// close ends the daemon in order.
func (w *world) close() {
	w.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	if w.svc == nil {
		return
	}
	if err := errors.Join(w.svc.Close(ctx), w.driver.Close(), w.journal.Close()); err != nil {
		w.t.Errorf("close the daemon: %v", err)
	}
	w.svc = nil
}

// restart ends the daemon in order and starts another.
func (w *world) restart() {
	w.t.Helper()
	w.close()
	w.open()
}

var errCrashed = errors.New("the daemon is gone")

// dead makes the daemon unable to do anything more, as kill -9 does: no engine step
// works and nothing is written. What it was doing fails; call buried afterwards.
func (w *world) dead() {
	w.script.onFault(func(fake.Op, string) error { return errCrashed })
	w.script.onStep(func(snapshot.Step, string) error { return errCrashed })
	_ = w.journal.Close()
}

// buried frees what the dead daemon has in this process and starts another.
func (w *world) buried() {
	w.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	_ = w.svc.Close(ctx)
	_ = w.driver.Close()
	w.script.onFault(nil)
	w.script.onStep(nil)
	w.script.onGuest(nil)
	w.open()
}

// finish ends all sandboxes and looks for leftovers.
func (w *world) finish() {
	w.script.onFault(nil)
	w.script.onStep(nil)
	if w.svc == nil {
		return
	}
	all, err := w.svc.Sandboxes(context.Background())
	if err != nil {
		w.t.Error(err)
	}
	for _, sb := range all {
		if err := w.svc.Kill(context.Background(), sb.ID); err != nil {
			w.t.Errorf("kill %s at the end: %v", sb.ID, err)
		}
	}
	w.empty()
	w.close()
	if ids := w.host.Running(); len(ids) > 0 {
		w.t.Errorf("machines are left after the daemon: %v", ids)
	}
	if dirs := w.dirs(); len(dirs) > 0 {
		w.t.Errorf("directories are left after the daemon: %v", dirs)
	}
}

// empty checks that there is no sandbox in the journal, and no directory or machine
// but those that the pool has.
func (w *world) empty() {
	w.t.Helper()
	w.svc.ending.Wait()
	rows, err := w.journal.ListSandboxes(context.Background(), metadata.SandboxFilter{})
	if err != nil {
		w.t.Error(err)
	}
	for _, r := range rows {
		w.t.Errorf("the journal has sandbox %s, %s (%s)", r.ID, r.State, r.Reason)
	}
	if w.svc.cfg.PoolSize > 0 {
		return
	}
	if ids := w.host.Running(); len(ids) > 0 {
		w.t.Errorf("machines are left: %v", ids)
	}
	if dirs := w.dirs(); len(dirs) > 0 {
		w.t.Errorf("directories are left: %v", dirs)
	}
	for _, m := range w.store.List() {
		if h := w.store.Holders(m.ID); len(h) > 0 {
			w.t.Errorf("snapshot %s is still held by %v", m.ID, h)
		}
	}
}

// consistent checks that journal, machines, directories and the service agree, and
// that nothing is half-made.
func (w *world) consistent() {
	w.t.Helper()
	w.svc.ending.Wait()
	ctx := context.Background()
	rows, err := w.journal.ListSandboxes(ctx, metadata.SandboxFilter{Life: metadata.Living})
	if err != nil {
		w.t.Fatal(err)
	}
	var ids []string
	for _, r := range rows {
		if r.State != string(Running) {
			w.t.Errorf("sandbox %s is %s in the journal", r.ID, r.State)
		}
		ids = append(ids, fromRow(r).machine())
	}
	slices.Sort(ids)
	if got := w.host.Running(); !slices.Equal(got, ids) {
		w.t.Errorf("machines %v run, the journal has %v", got, ids)
	}
	if got := w.dirs(); !slices.Equal(got, ids) {
		w.t.Errorf("directories are %v, the journal has %v", got, ids)
	}
	snaps, err := w.journal.ListSnapshots(ctx)
	if err != nil {
		w.t.Fatal(err)
	}
	for _, r := range snaps {
		if r.Status != string(SnapshotReady) {
			w.t.Errorf("snapshot %s is %s in the journal", r.ID, r.Status)
		}
		if _, err := w.store.Get(r.ID); err != nil {
			w.t.Errorf("snapshot %s of the journal: %v", r.ID, err)
		}
	}
	if stored := w.store.List(); len(stored) != len(snaps) {
		w.t.Errorf("%d snapshots are stored, the journal has %d", len(stored), len(snaps))
	}
	entries, err := os.ReadDir(filepath.Join(w.data, "snapshots"))
	if err != nil {
		w.t.Fatal(err)
	}
	for _, e := range entries {
		if kind := ident.KindOf(e.Name()); kind != ident.Snapshot && kind != ident.Checkpoint {
			w.t.Errorf("%s is left in the snapshot store", e.Name())
		}
	}
}

func (w *world) dirs() []string {
	entries, err := os.ReadDir(w.machines())
	if err != nil {
		w.t.Fatal(err)
	}
	var out []string
	for _, e := range entries {
		out = append(out, e.Name())
	}
	return out
}

// base makes a snapshot "base" with value=warm in memory and /data on its disk.
func (w *world) base() Snapshot {
	w.t.Helper()
	return w.create(CreateSnapshot{Tag: "base", Image: "debian", Warm: "value=warm", Exec: []string{"write /data from base"}})
}

func (w *world) create(c CreateSnapshot) Snapshot {
	w.t.Helper()
	sn, err := w.svc.CreateSnapshot(w.ctx(), c, nil)
	if err != nil {
		w.t.Fatal(err)
	}
	return sn
}

func (w *world) ctx() context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	w.t.Cleanup(cancel)
	return ctx
}

func (w *world) fork(ref string, n int) []Sandbox {
	w.t.Helper()
	items, err := w.svc.Fork(w.ctx(), Fork{Snapshot: ref, N: n}, nil)
	if err != nil {
		w.t.Fatal(err)
	}
	var out []Sandbox
	for _, it := range items {
		out = append(out, it.Sandbox)
	}
	return out
}

func (w *world) exec(ref string, argv ...string) string {
	w.t.Helper()
	res, err := w.svc.Exec(w.ctx(), ref, agentwire.ExecRequest{Argv: argv})
	if err != nil {
		w.t.Fatalf("exec %v in %s: %v", argv, ref, err)
	}
	return string(res.Stdout)
}

func (w *world) eval(ref, code string) string {
	w.t.Helper()
	res, err := w.svc.Eval(w.ctx(), ref, agentwire.EvalRequest{Code: code})
	if err != nil {
		w.t.Fatalf("eval %q in %s: %v", code, ref, err)
	}
	if res.Error != "" {
		w.t.Fatalf("eval %q in %s: %s", code, ref, res.Error)
	}
	return res.Result
}

// eventually waits for what happens in the background.
func (w *world) eventually(what string, ok func() bool) {
	w.t.Helper()
	tick := time.NewTicker(2 * time.Millisecond)
	defer tick.Stop()
	deadline := w.ctx()
	for !ok() {
		select {
		case <-tick.C:
		case <-deadline.Done():
			w.t.Fatalf("it did not happen that %s", what)
		}
	}
}

func (w *world) wantClass(err, class error) {
	w.t.Helper()
	if !errors.Is(err, class) {
		w.t.Errorf("error is %v, want class %v", err, class)
	}
}

// fakeImages is an image store that builds nothing.
type fakeImages struct {
	root engine.Root

	mu     sync.Mutex
	images map[string]image.Image // by name
	builds int
	build  func(ctx context.Context) error // called in Build, without the lock
}

func newFakeImages(t *testing.T, dir string) *fakeImages {
	f := &fakeImages{images: map[string]image.Image{}}
	f.root.Disk = filepath.Join(dir, "disk.ext4")
	if err := os.WriteFile(f.root.Disk, nil, 0o400); err != nil {
		t.Fatal(err)
	}
	f.add("debian")
	return f
}

func (f *fakeImages) add(name string) image.Image {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.images[name] = image.Image{ID: ident.New(ident.Image), Name: name, DiskMiB: 64, CreatedAt: time.Now()}
	return f.images[name]
}

func (f *fakeImages) Get(ref string) (image.Image, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, img := range f.images {
		if img.ID == ref || img.Name == ref {
			return img, nil
		}
	}
	return image.Image{}, errdefs.New(errdefs.ErrNotFound, "image %q: not found", ref)
}

func (f *fakeImages) List() ([]image.Image, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	var out []image.Image
	for _, img := range f.images {
		out = append(out, img)
	}
	return out, nil
}

func (f *fakeImages) Root(_ context.Context, id string) (engine.Root, error) {
	if _, err := f.Get(id); err != nil {
		return engine.Root{}, err
	}
	return f.root, nil
}

func (f *fakeImages) Build(ctx context.Context, spec image.BuildSpec, progress image.Progress) (image.Image, error) {
	f.mu.Lock()
	f.builds++
	build := f.build
	f.mu.Unlock()
	progress("building", 0.5)
	if build != nil {
		if err := build(ctx); err != nil {
			return image.Image{}, err
		}
	}
	return f.add(spec.Name), nil
}

func (f *fakeImages) Remove(_ context.Context, id string) error {
	img, err := f.Get(id)
	if err != nil {
		return err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	delete(f.images, img.Name)
	return nil
}
