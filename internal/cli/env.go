package cli

import (
	"context"
	"io"
	"log/slog"
	"os"
	"time"

	"github.com/mattn/go-isatty"

	"forkd.dev/forkd/internal/config"
	"forkd.dev/forkd/internal/doctor"
	"forkd.dev/forkd/internal/service"
	forkd "forkd.dev/forkd/sdk/go"
)

// Env is what the command line needs of its surroundings. Nil functions make the
// commands that need them fail with a clear error.
type Env struct {
	Stdin          io.Reader // nil means none
	Stdout, Stderr io.Writer
	Getenv         func(string) string // nil means os.Getenv
	Version        string
	Now            func() time.Time      // nil means time.Now
	IsTerminal     func(stream any) bool // nil asks the kernel
	SystemConfig   string                // path of the system's configuration; "" means none
	ServiceHost    *service.Host         // nil means this machine

	// FindDaemon returns a client of the daemon that is used if no address was given; nil
	// looks where daemons of this host put their sockets.
	FindDaemon func() (*forkd.Client, error)
	// StartPrivateDaemon starts a daemon with a data directory of its own choice and
	// an engine ("" is what the settings say) and returns its socket. The daemon must not die of this process's Ctrl-C;
	// stop ends it and all its sandboxes and may be called once.
	StartPrivateDaemon func(ctx context.Context, engine string) (socket string, stop func() error, err error)
	// Serve runs the daemon until ctx ends.
	Serve func(ctx context.Context, o ServeOptions) error
	// Doctor checks the host; engine is the one that is set, or "".
	Doctor func(ctx context.Context, engine string) (DoctorReport, error)
	// Engines looks at every engine; engine as in Doctor.
	Engines func(ctx context.Context, engine string) (doctor.EngineList, error)
	// InstallEngine gets the program behind an engine into the data directory.
	InstallEngine func(ctx context.Context, o InstallOptions) (Installed, error)
	Cleanup       func(ctx context.Context, o CleanupOptions) ([]string, error)
}

// ServeOptions are the settings of the daemon. Zero values mean its defaults.
type ServeOptions struct {
	Bind         []string // TCP addresses; the unix socket is always there
	DataDir      string
	TokenFile    string
	Prepare      []string // built-in snapshots to have ready
	MaxSandboxes int
	MemoryBudget config.Budget
	ResidentMax  config.Budget // memory images that nothing maps
	MinFreeMiB   *int          // of disk; nil is the default
	Engine       string        // "auto" or the name of one
	AllowedHosts []string
	LogLevel     slog.Level
}

// InstallOptions say which engine to install and from where.
type InstallOptions struct {
	Engine   string
	Newest   bool // built from its source instead of Debian's package
	Progress func(step string, fraction float64)
}

// Installed is what was installed.
type Installed struct {
	Engine  string `json:"engine"`
	Path    string `json:"path"`
	Version string `json:"version"`
	Source  string `json:"source"`
}

// CleanupOptions say what Cleanup does. It returns a line for each leftover.
type CleanupOptions struct {
	DataDir string
	Apply   bool // remove; otherwise only list
}

// DoctorReport is the outcome of the host checks. With --json it is marshaled.
type DoctorReport interface {
	WriteText(w io.Writer) error
	Failed() bool // a check failed
}

func (e Env) withDefaults() Env {
	if e.Stdout == nil {
		e.Stdout = io.Discard
	}
	if e.Stderr == nil {
		e.Stderr = io.Discard
	}
	if e.Getenv == nil {
		e.Getenv = os.Getenv
	}
	if e.Now == nil {
		e.Now = time.Now
	}
	if e.IsTerminal == nil {
		e.IsTerminal = isTerminal
	}
	return e
}

func isTerminal(stream any) bool {
	f, ok := stream.(*os.File)
	return ok && isatty.IsTerminal(f.Fd())
}
