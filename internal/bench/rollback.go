package bench

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"strings"
	"time"

	"forkd.dev/forkd/internal/errdefs"
	forkd "forkd.dev/forkd/sdk/go"
)

// RollbackOptions say what Rollback measures.
type RollbackOptions struct {
	Snapshot    string
	Count       int   // rollbacks for each of Pages
	Pages       []int // written between two rollbacks
	Checkpoints int   // calls to measure; 0 for none
	DirtyMiB    int   // written before each of them
}

// Validate tells what is wrong with o.
func (o RollbackOptions) Validate() error {
	switch {
	case o.Count < 1 || o.Count > maxRollouts:
		return errdefs.New(errdefs.ErrInvalid, "cannot measure %d rollbacks: 1 to %d are possible", o.Count, maxRollouts)
	case o.Checkpoints < 0 || o.Checkpoints > maxRuns:
		return errdefs.New(errdefs.ErrInvalid, "cannot measure %d checkpoints: 0 to %d are possible", o.Checkpoints, maxRuns)
	case o.DirtyMiB < 1 || o.DirtyMiB > 64<<10:
		return errdefs.New(errdefs.ErrInvalid, "cannot write %d MiB before a checkpoint: 1 to 65536 are possible", o.DirtyMiB)
	case len(o.Pages) == 0:
		return errdefs.New(errdefs.ErrInvalid, "say how many pages to write between rollbacks")
	}
	for _, n := range o.Pages {
		if n < 1 || n > 1<<20 {
			return errdefs.New(errdefs.ErrInvalid, "cannot write %d pages between rollbacks: 1 to %d are possible", n, 1<<20)
		}
	}
	return nil
}

// RollbackReport is the result of measuring rollbacks and checkpoints. The names in
// JSON stay.
type RollbackReport struct {
	About
	Rows        []any         `json:"rows"` // each a RollbackRow or the CheckpointRow
	Rollbacks   []RollbackRow `json:"-"`
	Checkpoints CheckpointRow `json:"-"` // nothing without calls
	Leaks       Leaks         `json:"leaks"`
}

// RollbackRow is some rollbacks of one sandbox to one checkpoint.
type RollbackRow struct {
	Kind       string   `json:"kind"`            // rollback
	DirtyPages int      `json:"dirty_pages"`     // written between two rollbacks, besides a file and a process
	P50MS      float64  `json:"rollback_ms_p50"` // request to the first answer of the warm runner
	MaxMS      float64  `json:"rollback_ms_max"`
	Correct    bool     `json:"correct"` // the state was right each time
	Count      int      `json:"count"`
	Right      int      `json:"right"`
	CallP50MS  float64  `json:"call_ms_p50"` // of this, the rollback call
	Failures   []string `json:"failures,omitempty"`

	times []float64
}

// CheckpointRow is some checkpoints of one sandbox.
type CheckpointRow struct {
	Kind      string  `json:"kind"`        // checkpoint
	CallP50MS float64 `json:"call_ms_p50"` // until the sandbox runs again
	DirtyMiB  int     `json:"dirty_mib"`
	ReadyMS   float64 `json:"ready_ms_p50"` // until it is written and proven
	PauseMS   float64 `json:"pause_ms_p50"`
	Count     int     `json:"count"`
}

// Rollback measures rollbacks and checkpoints. With [ErrAnswers] or [ErrLeak] the
// report is there all the same.
func Rollback(ctx context.Context, cfg Config, o RollbackOptions) (_ *RollbackReport, err error) {
	if err := o.Validate(); err != nil {
		return nil, err
	}
	s, machine, err := openQuiet(ctx, cfg, o.Snapshot, 0)
	defer func() { err = errors.Join(err, s.close(ctx)) }()
	if err != nil {
		return nil, err
	}
	r := &RollbackReport{About: s.about("rollback", machine), Leaks: newLeaks(nil, nil)}
	for _, pages := range o.Pages {
		row, err := s.rollbackRow(ctx, pages, o.Count, &r.Leaks)
		if err != nil {
			return nil, err
		}
		r.Rollbacks, r.Rows = append(r.Rollbacks, row), append(r.Rows, row)
	}
	if o.Checkpoints > 0 {
		if r.Checkpoints, err = s.checkpointRow(ctx, o); err != nil {
			return nil, err
		}
		r.Rows = append(r.Rows, r.Checkpoints)
	}
	return r, r.verdict()
}

func (r *RollbackReport) verdict() error {
	for _, row := range r.Rollbacks {
		if !row.Correct {
			return fmt.Errorf("%w: the state was right after %d of %d rollbacks: %s", ErrAnswers, row.Right, row.Count, strings.Join(row.Failures, "; "))
		}
	}
	if len(r.Leaks.Leaked) > 0 {
		return fmt.Errorf("%w: %s", ErrLeak, r.Leaks.text())
	}
	return nil
}

// The state that a rollback must bring back: memory, a file, the processes, the
// numbers of a seeded generator. The kernel's random numbers, last, must be new.
const (
	stateSetup = `
import binascii, os, random, subprocess
import numpy
bench_dir = "/var/tmp/forkd-bench"
os.makedirs(bench_dir, exist_ok=True)
bench_m = numpy.random.RandomState(1).randint(0, 256, %d * 4096, dtype=numpy.uint8)
def bench_write(name, content):
    with open(os.path.join(bench_dir, name), "wb") as f:
        f.write(content)
        f.flush()
        os.fsync(f.fileno())
def bench_hash():
    return "%%08x" %% binascii.crc32(bench_m)
def bench_state():
    files = []
    for name in sorted(os.listdir(bench_dir)):
        with open(os.path.join(bench_dir, name), "rb") as f:
            files.append("%%s:%%08x" %% (name, binascii.crc32(f.read())))
    procs = []
    for p in sorted(int(d) for d in os.listdir("/proc") if d.isdigit()):
        try:
            with open("/proc/%%d/cmdline" %% p, "rb") as f:
                line = f.read()
        except OSError:
            continue
        if line and p > 1:
            procs.append("%%d:%%08x" %% (p, binascii.crc32(line)))
    return "|".join([bench_hash(), ",".join(files), ",".join(procs), str(random.random()), os.urandom(16).hex()])
bench_write("state", os.urandom(65536))
random.seed(7)
'set'`
	stateRead   = "bench_state()"
	stateChange = `
r = numpy.random.RandomState(%[1]d)
bench_m[numpy.arange(%[2]d) * 4096 + r.randint(0, 4096, %[2]d)] ^= numpy.uint8(1 + %[1]d %% 255)
bench_write("state", r.bytes(65536))
bench_write("new-%[1]d", b"new")
bench_child = subprocess.Popen(["sleep", "600"])
random.random()
'changed:' + bench_hash()`
)

// state is what a sandbox tells of itself.
type state struct{ kept, random string }

func (s *subject) state(ctx context.Context, id string) (state, error) {
	text, err := s.eval(ctx, id, stateRead)
	if err != nil {
		return state{}, err
	}
	text = strings.Trim(text, "'")
	i := strings.LastIndexByte(text, '|')
	if i < 0 {
		return state{}, errdefs.New(errdefs.ErrGuest, "the state of %s is %.80q", id, text)
	}
	return state{text[:i], text[i+1:]}, nil
}

func (st state) memory() string {
	hash, _, _ := strings.Cut(st.kept, "|")
	return hash
}

// roller back of one sandbox.
type rollbacker struct {
	s          *subject
	id         string
	checkpoint string
	want       state
	pages      int
	random     map[string]bool // seen from the kernel
}

// rollbackUnmeasured is how often is rolled back before the measurement.
const rollbackUnmeasured = 2

func (s *subject) rollbackRow(ctx context.Context, pages, count int, leaks *Leaks) (row RollbackRow, err error) {
	row = RollbackRow{Kind: "rollback", DirtyPages: pages, Count: count}
	sb, err := s.source(ctx)
	if err != nil {
		return row, err
	}
	defer func() { err = errors.Join(err, s.kill(ctx, []string{sb.ID})) }()
	b, err := s.rollbacker(ctx, sb.ID, pages)
	if err != nil {
		return row, err
	}
	for i := range rollbackUnmeasured {
		if _, err := b.one(ctx, i); err != nil {
			return row, err
		}
	}
	look := &inspector{
		fs: s.meter.fs, daemon: s.meter.daemon, cgroup: s.group, idle: s.cfg.Client.Close,
		sandboxes: filepath.Join(filepath.Dir(filepath.Dir(s.detail.Dir)), "sandboxes"),
	}
	before, err := look.atRest(ctx, nil)
	if err != nil {
		return row, err
	}
	if err := b.all(ctx, &row); err != nil {
		return row, err
	}
	after, err := look.atRest(ctx, before)
	if err != nil {
		return row, err
	}
	if found := newLeaks(before, after); leaks.Before == nil || len(found.Leaked) > 0 {
		*leaks = found
	}
	return row, nil
}

// rollbacker prepares a sandbox and its checkpoint.
func (s *subject) rollbacker(ctx context.Context, id string, pages int) (*rollbacker, error) {
	if answer, err := s.eval(ctx, id, fmt.Sprintf(stateSetup, pages)); err != nil || answer != "'set'" {
		return nil, fmt.Errorf("prepare %s: %w", id, cmpErr(err, errdefs.New(errdefs.ErrGuest, "answered %.80q", answer)))
	}
	made, err := s.cfg.Client.Checkpoint(ctx, id, forkd.CheckpointRequest{Label: "bench", Sync: true})
	if err != nil {
		return nil, err
	}
	if err := s.readyCheckpoint(ctx, id, made.ID); err != nil {
		return nil, err
	}
	want, err := s.state(ctx, id)
	return &rollbacker{s: s, id: id, checkpoint: made.ID, want: want, pages: pages, random: map[string]bool{want.random: true}}, err
}

func (b *rollbacker) all(ctx context.Context, row *RollbackRow) error {
	var calls []float64
	for i := range row.Count {
		b.s.cfg.step("%d pages dirty: rollback %d of %d", b.pages, i+1, row.Count)
		o, err := b.one(ctx, rollbackUnmeasured+i)
		if err != nil {
			return err
		}
		row.times, calls = append(row.times, o.answerMS), append(calls, o.callMS)
		switch {
		case o.wrong == "":
			row.Right++
		case len(row.Failures) < maxFailures:
			row.Failures = append(row.Failures, fmt.Sprintf("rollback %d: %s", i+1, o.wrong))
		}
	}
	row.Correct = row.Right == row.Count
	row.P50MS, row.MaxMS, row.CallP50MS = percentile(row.times, 50), percentile(row.times, 100), percentile(calls, 50)
	return nil
}

// rolled is one rollback.
type rolled struct {
	callMS, answerMS float64
	wrong            string // what was not as it must be
}

// one changes the sandbox, rolls it back and looks at it.
func (b *rollbacker) one(ctx context.Context, i int) (o rolled, err error) {
	changed, err := b.s.eval(ctx, b.id, fmt.Sprintf(stateChange, i, b.pages))
	if err != nil {
		return o, fmt.Errorf("write in %s: %w", b.id, err)
	}
	if changed == "'changed:"+b.want.memory()+"'" {
		return o, errdefs.New(errdefs.ErrGuest, "writing in %s changed nothing", b.id)
	}
	start := time.Now()
	if _, err := b.s.cfg.Client.Rollback(ctx, b.id, b.checkpoint); err != nil {
		return o, fmt.Errorf("roll %s back: %w", b.id, err)
	}
	o.callMS = millis(time.Since(start))
	answer, err := b.s.ask(ctx, b.id)
	o.answerMS = millis(time.Since(start))
	if err != nil {
		return o, fmt.Errorf("ask %s after its rollback: %w", b.id, err)
	}
	got, err := b.s.state(ctx, b.id)
	switch {
	case err != nil:
		return o, fmt.Errorf("look at %s after its rollback: %w", b.id, err)
	case answer != b.s.answer:
		o.wrong = fmt.Sprintf("answered %.80q instead of %q", answer, b.s.answer)
	case got.kept != b.want.kept:
		o.wrong = differ(b.want.kept, got.kept)
	case b.random[got.random]:
		o.wrong = "the kernel repeats its random numbers"
	}
	b.random[got.random] = true
	return o, nil
}

// differ says which part of a state is not as it was.
func differ(want, got string) string {
	a, b := strings.Split(want, "|"), strings.Split(got, "|")
	for i, what := range []string{"the memory", "the files", "the processes", "the generator's next number"} {
		if i < len(a) && i < len(b) && a[i] != b[i] {
			return fmt.Sprintf("%s: %.200q instead of %.200q", what, b[i], a[i])
		}
	}
	return fmt.Sprintf("the state is %.200q", got)
}

// checkpointRow measures checkpoints one after the other.
func (s *subject) checkpointRow(ctx context.Context, o RollbackOptions) (row CheckpointRow, err error) {
	sb, err := s.source(ctx)
	if err != nil {
		return row, err
	}
	defer func() { err = errors.Join(err, s.kill(ctx, []string{sb.ID})) }()
	var calls, ready, pauses []float64
	for i := range o.Checkpoints {
		s.cfg.step("%d MiB dirty: checkpoint %d of %d", o.DirtyMiB, i+1, o.Checkpoints)
		if err := s.dirty(ctx, sb.ID, o.DirtyMiB, 0, i); err != nil {
			return row, err
		}
		start := time.Now()
		made, err := s.cfg.Client.Checkpoint(ctx, sb.ID, forkd.CheckpointRequest{})
		if err != nil {
			return row, fmt.Errorf("make a checkpoint of %s: %w", sb.ID, err)
		}
		calls = append(calls, millis(time.Since(start)))
		if err := s.readyCheckpoint(ctx, sb.ID, made.ID); err != nil {
			return row, err
		}
		ready = append(ready, millis(time.Since(start)))
		if made.PauseMS != nil {
			pauses = append(pauses, round(*made.PauseMS, 2))
		}
	}
	return CheckpointRow{
		Kind: "checkpoint", CallP50MS: percentile(calls, 50), DirtyMiB: o.DirtyMiB, ReadyMS: percentile(ready, 50), PauseMS: percentile(pauses, 50), Count: o.Checkpoints,
	}, nil
}
