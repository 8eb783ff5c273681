package cli

import (
	"fmt"
	"io"
	"sync"
	"time"
)

// quietTime is how long an operation may take before it is worth a line.
const quietTime = time.Second

// progress tells on standard error what a long operation does: one line that
// changes on a terminal, else a line for each step. What is over within a second
// leaves nothing.
type progress struct {
	w       io.Writer // nil says nothing
	tty     bool
	started time.Time

	// mu orders what is written, so it is held while a line is.
	mu sync.Mutex
	// +checklocks:mu
	current string
	// +checklocks:mu
	printed string
	// +checklocks:mu
	shown bool // a changing line stands on the terminal
	// +checklocks:mu
	timer *time.Timer
}

func (a *app) progress() *progress {
	if a.quiet {
		return &progress{}
	}
	return &progress{w: a.env.Stderr, tty: a.env.IsTerminal(a.env.Stderr), started: time.Now()}
}

// step says what is done now; fraction is negative if unknown.
func (p *progress) step(name string, fraction float64) {
	if p.w == nil {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	name = oneLine(name)
	p.current = name
	if p.tty {
		line := name
		if fraction >= 0 && fraction <= 1 {
			line = fmt.Sprintf("%s (%.0f%%)", name, fraction*100)
		}
		fmt.Fprintf(p.w, "\r\x1b[K%s", line)
		p.shown = true
		return
	}
	if wait := quietTime - time.Since(p.started); wait > 0 {
		if p.timer == nil {
			p.timer = time.AfterFunc(wait, p.late)
		}
		return
	}
	p.printLocked()
}

// late prints the step that runs when the quiet time is over.
func (p *progress) late() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.printLocked()
}

func (p *progress) printLocked() {
	if p.current != "" && p.current != p.printed {
		fmt.Fprintf(p.w, "forkd: %s\n", p.current)
		p.printed = p.current
	}
}

// done ends the telling; it may be repeated.
func (p *progress) done() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.current = ""
	if p.timer != nil {
		p.timer.Stop()
		p.timer = nil
	}
	if p.shown {
		fmt.Fprint(p.w, "\r\x1b[K")
		p.shown = false
	}
}
