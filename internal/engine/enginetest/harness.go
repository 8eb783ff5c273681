package enginetest

import (
	"context"
	"net"
	"testing"
	"time"

	"forkd.dev/forkd/internal/agentwire"
	"forkd.dev/forkd/internal/engine"
)

// Guest is a connection to the agent of one machine, with a program in the guest
// that lives as long as the machine (and its forks).
type Guest interface {
	Prober
	Storage
	Capturee
	Close() error
}

// Prober asks a guest how it is.
type Prober interface {
	Ping(ctx context.Context) error
	// Now is the wall clock of the guest.
	Now(ctx context.Context) (time.Time, error)
}

// Storage keeps texts in the memory of the long-living program and on the disk.
type Storage interface {
	Set(ctx context.Context, name, value string) error
	Get(ctx context.Context, name string) (string, error)
	WriteFile(ctx context.Context, path, text string) error
	ReadFile(ctx context.Context, path string) (string, error)
}

// Capturee is the guest's part in a capture.
type Capturee interface {
	Prepare(ctx context.Context, m agentwire.Prepare) error
	Commit(ctx context.Context) error
	VerdictFork(ctx context.Context, id agentwire.Identity) (agentwire.Receipt, error)
	VerdictSource(ctx context.Context) error
}

// Power is something an engine may lack.
type Power string

// What an engine may declare missing.
const (
	LiveCapture Power = "capture of a machine that goes on"
	Pooling     Power = "prepared machines"
	Consoles    Power = "console output"
)

// Harness is an engine under test.
type Harness struct {
	// Open returns a driver. The suite opens a second one of the same installation,
	// as a new daemon would, after it closed the first.
	Open func(t testing.TB) engine.Driver
	// Dir is where directories of machines and captures are made. A machine's process
	// must be able to search it.
	Dir   string
	Root  engine.Root
	Shape engine.Shape
	// Connect says hello on a connection it owns from then on.
	Connect func(ctx context.Context, conn net.Conn) (Guest, error)
	// Start configures a freshly booted guest and starts its long-living program.
	Start func(ctx context.Context, g Guest) error
	// Crash ends a machine from outside, not through its driver.
	Crash func(t testing.TB, m engine.Machine)
	// Inspect, if set, looks at a running fork of chain as only the engine's own test
	// can: at its process, for example.
	Inspect func(t *testing.T, m engine.Machine, chain []engine.State)
	// Lacks says what the engine cannot do, and why.
	Lacks map[Power]string
	// Patience bounds every step but the boot, which has BootPatience.
	Patience, BootPatience time.Duration
	// Silence is how long a paused guest is listened to.
	Silence time.Duration
	// Fleet is how many machines are restored at once.
	Fleet int
}

func (h Harness) withDefaults() Harness {
	if h.Patience == 0 {
		h.Patience = 10 * time.Second
	}
	if h.BootPatience == 0 {
		h.BootPatience = h.Patience
	}
	if h.Silence == 0 {
		h.Silence = 100 * time.Millisecond
	}
	if h.Fleet == 0 {
		h.Fleet = 20
	}
	return h
}

// lacks tells whether the engine declares p missing, and logs it.
func (s *suite) lacks(t *testing.T, p Power) bool {
	why, lacking := s.h.Lacks[p]
	if lacking {
		t.Logf("the engine declares no %s: %s", p, why)
	}
	return lacking
}
