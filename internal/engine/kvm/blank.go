package kvm

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"forkd.dev/forkd/internal/engine"
	"forkd.dev/forkd/internal/ident"
	"forkd.dev/forkd/internal/linux"
)

// Directories in the driver's own.
const (
	// claimsDir has a link for each machine whose process was blank once: from its token to
	// the machine's id. It is made before the machine is, and removed with it.
	claimsDir = "claims"
	// blankDir has a directory with sockets and log for each blank process.
	blankDir = "blank"
)

// blankMark begins the last part of the name of a process that was started blank.
const blankMark = "blank-"

// blanks keeps blank processes of the shapes that were used last. One worker makes them,
// when no machine was wanted for a while.
type blanks struct {
	d    *Driver
	want int // of each shape
	wake chan struct{}
	done chan struct{}

	mu sync.Mutex
	// +checklocks:mu
	shapes []engine.Shape // used last first, at most maxShapes
	// +checklocks:mu
	ready []blank
	// +checklocks:mu
	closed bool
}

type blank struct {
	shape engine.Shape
	p     *process
}

const (
	maxShapes = 2
	// blankIdle is how long no machine may have been wanted before blanks are made.
	blankIdle = 100 * time.Millisecond
)

func newBlanks(d *Driver, want int) *blanks {
	b := &blanks{d: d, want: want, wake: make(chan struct{}, 1), done: make(chan struct{})}
	go func() {
		defer close(b.done)
		b.work(d.ctx)
	}()
	return b
}

// take returns a blank process of a shape, or nil, and remembers the shape.
func (b *blanks) take(shape engine.Shape) *process {
	b.mu.Lock()
	defer b.mu.Unlock()
	defer func() {
		select {
		case b.wake <- struct{}{}:
		default:
		}
	}()
	b.shapes = slices.DeleteFunc(b.shapes, func(s engine.Shape) bool { return s == shape })
	b.shapes = slices.Insert(b.shapes, 0, shape)
	b.shapes = b.shapes[:min(len(b.shapes), maxShapes)]
	for {
		i := slices.IndexFunc(b.ready, func(x blank) bool { return x.shape == shape })
		if i < 0 {
			return nil
		}
		p := b.ready[i].p
		b.ready = slices.Delete(b.ready, i, i+1)
		if p.alive() {
			return p
		}
		b.d.group.Go(func() { b.d.endBlank(p) })
	}
}

// work is the worker.
func (b *blanks) work(ctx context.Context) {
	quiet := time.NewTimer(time.Hour)
	defer quiet.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-b.wake:
			quiet.Reset(blankIdle)
			continue
		case <-quiet.C:
		}
		for b.makeOne() && len(b.wake) == 0 {
		}
	}
}

// makeOne makes a blank process where one is missing. It reports whether to go on.
func (b *blanks) makeOne() bool {
	shape, surplus := b.needy()
	for _, x := range surplus {
		b.d.endBlank(x.p)
	}
	if shape == (engine.Shape{}) {
		return false
	}
	p, err := b.d.startBlank(shape)
	if err != nil {
		b.d.cfg.Log("prepare a process: %v", err)
		return false
	}
	b.mu.Lock()
	kept := !b.closed
	if kept {
		b.ready = append(b.ready, blank{shape, p})
	}
	b.mu.Unlock()
	if !kept {
		b.d.endBlank(p)
	}
	return kept
}

// needy returns a shape that lacks processes, and takes those out whose shape is not used any more.
func (b *blanks) needy() (engine.Shape, []blank) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.closed {
		return engine.Shape{}, nil
	}
	var surplus []blank
	have := map[engine.Shape]int{}
	b.ready = slices.DeleteFunc(b.ready, func(x blank) bool {
		if slices.Contains(b.shapes, x.shape) {
			have[x.shape]++
			return false
		}
		surplus = append(surplus, x)
		return true
	})
	for _, s := range b.shapes {
		if have[s] < b.want {
			return s, surplus
		}
	}
	return engine.Shape{}, surplus
}

// close ends all blank processes. The worker ends with the driver's context.
func (b *blanks) close() {
	b.mu.Lock()
	b.closed = true
	list := b.ready
	b.ready = nil
	b.mu.Unlock()
	for _, x := range list {
		b.d.endBlank(x.p)
	}
	b.d.cancel()
	<-b.done
}

// startBlank starts a process for a shape.
func (d *Driver) startBlank(shape engine.Shape) (*process, error) {
	token := blankMark + ident.New(ident.Sandbox)
	dir := filepath.Join(d.cfg.Dir, blankDir, token)
	if err := os.Mkdir(dir, 0o700); err != nil {
		return nil, fmt.Errorf("make directory of a prepared process: %w", err)
	}
	p, err := d.start(d.processName(token), dir, shape)
	if err != nil {
		return nil, errors.Join(sayWhy(err, dir), os.RemoveAll(dir))
	}
	p.token = token
	return p, nil
}

// endBlank ends a blank process.
func (d *Driver) endBlank(p *process) {
	p.kill()
	d.freeUID(p.uid)
	if err := os.RemoveAll(filepath.Join(d.cfg.Dir, blankDir, p.token)); err != nil {
		d.cfg.Log("end a prepared process: %v", err)
	}
}

// claim notes that the process of a token is machine id from now on.
func (d *Driver) claim(token, id string) error {
	if err := os.Symlink(id, filepath.Join(d.cfg.Dir, claimsDir, token)); err != nil {
		return fmt.Errorf("claim a prepared process: %w", err)
	}
	return nil
}

// unclaim removes the note. An empty token has none.
func (d *Driver) unclaim(token string) {
	if token == "" {
		return
	}
	if err := os.Remove(filepath.Join(d.cfg.Dir, claimsDir, token)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		d.cfg.Log("remove claim: %v", err)
	}
}

// machineOf returns the machine that a process of ours runs, by the last part of its name:
// "" if it is blank.
func (d *Driver) machineOf(name string) string {
	if ident.KindOf(name) == ident.Sandbox {
		return name
	}
	if !strings.HasPrefix(name, blankMark) || strings.ContainsRune(name, '/') {
		return ""
	}
	id, err := os.Readlink(filepath.Join(d.cfg.Dir, claimsDir, name))
	if err != nil || ident.KindOf(id) != ident.Sandbox {
		return ""
	}
	return id
}

// endBlanks ends the blank processes that a driver left which did not close, and removes
// what is left of others.
func (d *Driver) endBlanks(ctx context.Context) error {
	living := map[string]bool{}
	var victims []linux.Process
	err := d.eachProcess(func(pid int, name string) {
		living[name] = true
		if strings.HasPrefix(name, blankMark) && d.machineOf(name) == "" {
			if p, err := linux.Identify(pid); err == nil {
				victims = append(victims, p)
			}
		}
	})
	if err != nil {
		return err
	}
	if err := endProcesses(ctx, victims); err != nil {
		return err
	}
	if err := os.RemoveAll(filepath.Join(d.cfg.Dir, blankDir)); err != nil {
		return err
	}
	if err := os.Mkdir(filepath.Join(d.cfg.Dir, blankDir), 0o711); err != nil {
		return err
	}
	claims, err := os.ReadDir(filepath.Join(d.cfg.Dir, claimsDir))
	for _, c := range claims {
		if !living[c.Name()] {
			d.unclaim(c.Name())
		}
	}
	return err
}
