// Package modeltest drives a daemon through random sequences of fork, write, branch,
// checkpoint, rollback, delete, compact, crash and restart, and compares it with a
// simple model of what each sandbox and snapshot must contain.
//
// The daemon is whatever implements [Host]: the service over the fake engine, or a real
// daemon with real machines. A failure names the seed and the last steps.
package modeltest

import (
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"forkd.dev/forkd/internal/errdefs"
)

// Content is what the model knows of a machine: one value in the memory of a program
// and one file.
type Content struct{ Memory, Disk string }

// State is a snapshot as a host lists it.
type State struct {
	ID       string
	ParentID string
	Users    int  // sandboxes that were made from it last
	Passing  bool // it was made for one call and goes by itself
}

// Host is a daemon under test. Methods fail the test on what is no answer of the
// daemon, and return what the daemon answers.
type Host interface {
	Fork(ref string) (id string, err error)
	Write(id string, c Content) error
	Read(id string) (Content, error)
	Branch(id, tag string) (snapshot string, err error)
	Checkpoint(id string) (snapshot string, err error)
	Rollback(id, checkpoint string) error
	Kill(id string) error
	Delete(snapshot string) error
	Compact(snapshot, tag string) (compacted string, err error)
	// Crash ends the machine of a sandbox from outside and waits until the daemon knows.
	Crash(id string) error
	// Restart ends the daemon, in order or not, and starts another.
	Restart(orderly bool) error
	Snapshots() ([]State, error)
	// Sandboxes lists the ids of all that live or are lost.
	Sandboxes() ([]string, error)
}

// Config says how long and from where.
type Config struct {
	Seed         uint64
	Steps        int
	Base         string // snapshot id that is there at the start and never deleted
	BaseIs       Content
	MaxSandboxes int
	MaxSnapshots int
	// CheckEvery is after how many steps everything is compared.
	CheckEvery int
}

// sandbox is what the model knows of one.
type sandbox struct {
	Content
	checkpoints []string
	lost        bool
}

// state is what the model knows of a snapshot.
type state struct {
	Content
	owner string // of a checkpoint: its sandbox
}

type model struct {
	t         testing.TB
	h         Host
	cfg       Config
	rng       *rand.Rand
	sandboxes map[string]*sandbox
	states    map[string]*state
	names     int
	trace     []string
}

// Run drives h through cfg.Steps random steps and ends all sandboxes.
func Run(t testing.TB, h Host, cfg Config) {
	t.Helper()
	m := &model{
		t: t, h: h, cfg: cfg, rng: rand.New(rand.NewPCG(cfg.Seed, 1)),
		sandboxes: map[string]*sandbox{}, states: map[string]*state{cfg.Base: {Content: cfg.BaseIs}},
	}
	t.Logf("model: seed %d, %d steps", cfg.Seed, cfg.Steps)
	for i := range cfg.Steps {
		m.step(i)
		if (i+1)%cfg.CheckEvery == 0 {
			m.checkAll()
		}
	}
	m.checkAll()
	for _, id := range m.ids() {
		m.kill(id)
	}
}

// fail ends the test with what led to it.
func (m *model) fail(format string, args ...any) {
	m.t.Helper()
	last := m.trace[max(0, len(m.trace)-25):]
	m.t.Fatalf("model, seed %d, step %d: %s\nlast steps:\n  %s", m.cfg.Seed, len(m.trace), fmt.Sprintf(format, args...), strings.Join(last, "\n  "))
}

func (m *model) did(format string, args ...any) {
	m.trace = append(m.trace, fmt.Sprintf(format, args...))
}

func (m *model) must(err error) {
	m.t.Helper()
	if err != nil {
		m.fail("%v", err)
	}
}

func (m *model) ids() []string { return slices.Sorted(maps.Keys(m.sandboxes)) }

// pick returns one of list, or "".
func (m *model) pick(list []string) string {
	if len(list) == 0 {
		return ""
	}
	return list[m.rng.IntN(len(list))]
}

// running picks a sandbox that runs, or "".
func (m *model) running() string {
	return m.pick(slices.DeleteFunc(m.ids(), func(id string) bool { return m.sandboxes[id].lost }))
}

func (m *model) fresh() Content {
	m.names++
	return Content{Memory: fmt.Sprintf("m%d", m.names), Disk: fmt.Sprintf("d%d", m.names)}
}

// step does one thing that is possible now.
func (m *model) step(i int) {
	id := m.running()
	if id == "" {
		m.fork(m.cfg.Base)
		return
	}
	switch n := m.rng.IntN(100); {
	case n < 14 && len(m.sandboxes) < m.cfg.MaxSandboxes:
		m.fork(m.pick(slices.Sorted(maps.Keys(m.states))))
	case n < 18 && len(m.sandboxes) < m.cfg.MaxSandboxes:
		m.fork(id)
	case n < 40:
		m.write(id)
	case n < 50 && len(m.states) < m.cfg.MaxSnapshots:
		m.branch(id)
	case n < 63 && len(m.states) < m.cfg.MaxSnapshots:
		m.checkpoint(id)
	case n < 78:
		m.rollback(m.pick(m.ids()))
	case n < 84:
		m.kill(m.pick(m.ids()))
	case n < 91:
		m.remove(m.pick(slices.Sorted(maps.Keys(m.states))))
	case n < 94 && len(m.states) < m.cfg.MaxSnapshots:
		m.compact(m.pick(slices.Sorted(maps.Keys(m.states))))
	case n < 97:
		m.crash(id)
	case n < 99:
		m.restart(i%2 == 0)
	default:
		m.write(id)
	}
	m.check(m.running())
}

func (m *model) fork(ref string) (id string) {
	var content Content
	if sb := m.sandboxes[ref]; sb != nil {
		content = sb.Content
	} else {
		content = m.states[ref].Content
	}
	id, err := m.h.Fork(ref)
	m.did("fork %s -> %s", ref, id)
	m.must(err)
	m.sandboxes[id] = &sandbox{Content: content}
	m.check(id)
	return id
}

func (m *model) write(id string) {
	c := m.fresh()
	m.did("write %s %v", id, c)
	m.must(m.h.Write(id, c))
	m.sandboxes[id].Content = c
}

func (m *model) branch(id string) {
	m.names++
	sn, err := m.h.Branch(id, fmt.Sprintf("model-%d-%d", m.cfg.Seed, m.names))
	m.did("branch %s -> %s", id, sn)
	m.must(err)
	m.states[sn] = &state{Content: m.sandboxes[id].Content}
}

func (m *model) checkpoint(id string) {
	sn, err := m.h.Checkpoint(id)
	m.did("checkpoint %s -> %s", id, sn)
	m.must(err)
	sb := m.sandboxes[id]
	sb.checkpoints = append(sb.checkpoints, sn)
	m.states[sn] = &state{Content: sb.Content, owner: id}
}

func (m *model) rollback(id string) {
	sb := m.sandboxes[id]
	to := m.pick(sb.checkpoints)
	if to == "" {
		return
	}
	m.did("rollback %s to %s", id, to)
	m.must(m.h.Rollback(id, to))
	sb.Content, sb.lost = m.states[to].Content, false
	m.settle()
	m.check(id)
}

func (m *model) kill(id string) {
	m.did("kill %s", id)
	m.must(m.h.Kill(id))
	delete(m.sandboxes, id)
	m.settle() // its checkpoints went with it, unless something needs them
}

// remove deletes a snapshot, which works exactly if nothing needs it.
func (m *model) remove(id string) {
	if id == m.cfg.Base {
		return
	}
	needed := false
	list, err := m.h.Snapshots()
	m.must(err)
	for _, s := range list {
		needed = needed || s.ParentID == id || s.ID == id && s.Users > 0
	}
	err = m.h.Delete(id)
	m.did("delete %s: %v", id, err)
	switch {
	case needed && !errors.Is(err, errdefs.ErrConflict):
		m.fail("deleting %s, which is needed, gave %v", id, err)
	case !needed:
		m.must(err)
		m.forget(id)
		m.settle()
	}
}

func (m *model) forget(id string) {
	delete(m.states, id)
	for _, sb := range m.sandboxes {
		sb.checkpoints = slices.DeleteFunc(sb.checkpoints, func(c string) bool { return c == id })
	}
}

func (m *model) compact(id string) {
	m.names++
	sn, err := m.h.Compact(id, fmt.Sprintf("model-%d-%d", m.cfg.Seed, m.names))
	m.did("compact %s -> %s", id, sn)
	m.must(err)
	m.states[sn] = &state{Content: m.states[id].Content}
}

// crash ends a machine: with a checkpoint the sandbox is lost, without it is gone.
func (m *model) crash(id string) {
	m.did("crash %s", id)
	m.must(m.h.Crash(id))
	sb := m.sandboxes[id]
	if len(sb.checkpoints) == 0 {
		delete(m.sandboxes, id)
	}
	sb.lost = true
	m.settle()
}

func (m *model) restart(orderly bool) {
	m.did("restart, orderly %v", orderly)
	m.must(m.h.Restart(orderly))
	m.settle()
}

// check compares one sandbox with the model.
func (m *model) check(id string) {
	sb := m.sandboxes[id]
	if sb == nil || sb.lost {
		return
	}
	got, err := m.h.Read(id)
	m.must(err)
	if got != sb.Content {
		m.fail("sandbox %s has %+v, want %+v", id, got, sb.Content)
	}
}

// settle compares what there is, and forgets what went with its owner. What the daemon
// removes by itself may take a moment.
func (m *model) settle() {
	var wrong string
	tick := time.NewTicker(patience / 100)
	defer tick.Stop()
	for range 100 {
		if wrong = m.listed(); wrong == "" {
			break
		}
		<-tick.C
	}
	if wrong != "" {
		m.fail("%s", wrong)
	}
	ids, err := m.h.Sandboxes()
	m.must(err)
	slices.Sort(ids)
	if want := m.ids(); !slices.Equal(ids, want) {
		m.fail("sandboxes are %v, want %v", ids, want)
	}
}

// patience is how long the daemon may take to remove what nothing needs.
const patience = 10 * time.Second

// listed compares the list of snapshots and says what is wrong with it.
func (m *model) listed() string {
	list, err := m.h.Snapshots()
	m.must(err)
	there, needed := map[string]bool{}, map[string]bool{}
	for _, s := range list {
		there[s.ID], needed[s.ParentID] = true, true
	}
	for _, s := range list {
		st, free := m.states[s.ID], s.Users == 0 && !needed[s.ID]
		switch {
		case st == nil && !s.Passing:
			return fmt.Sprintf("snapshot %s is there, and nobody made it", s.ID)
		case s.Passing && free:
			return fmt.Sprintf("snapshot %s of a fork call stays, although nothing needs it", s.ID)
		case st != nil && st.owner != "" && m.sandboxes[st.owner] == nil && free:
			return fmt.Sprintf("checkpoint %s stays, although its sandbox %s is gone and nothing needs it", s.ID, st.owner)
		}
	}
	for id, st := range m.states {
		if there[id] {
			continue
		}
		if st.owner == "" || m.sandboxes[st.owner] != nil {
			return fmt.Sprintf("snapshot %s (of %q) is gone", id, st.owner)
		}
		m.forget(id)
	}
	return ""
}

// checkAll compares all sandboxes, and a few snapshots by forking them.
func (m *model) checkAll() {
	m.settle()
	for _, id := range m.ids() {
		m.check(id)
	}
	for range 3 {
		m.kill(m.fork(m.pick(slices.Sorted(maps.Keys(m.states)))))
	}
}
