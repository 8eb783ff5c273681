// Package runsc gets gVisor's runsc, the program behind the gvisor engine, into a
// directory of ours: from Debian's bookworm-backports, or built from the newest
// source of the Go module proxy.
//
// Both work in a staging directory beside the goal. The program there must answer
// [Config.Check] before one rename puts it in place, so that a failure, a cancellation
// or a crash leaves what was there before; a crash leaves a staging directory, which
// the next installation removes. Nothing of the host outside of the directory changes,
// but for the caches of the go command.
package runsc

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"forkd.dev/forkd/internal/errdefs"
)

// Name is the program's name in [Config.Dir].
const Name = "runsc"

// Config is what an installation needs.
type Config struct {
	// DataDir gets the program as libexec/runsc.
	DataDir string
	// Check returns the version of the program libexec/runsc below a directory, or why
	// it will not do. The program is used only if there is no error.
	Check func(dir string) (version string, err error)
	// Sources are lines of sources.list for bookworm-backports.
	Sources []string
	// Progress may be nil.
	Progress func(step string, fraction float64)
}

// Installed is what was installed.
type Installed struct {
	Path    string
	Version string
	Source  string // in words
}

// Debian installs the package of bookworm-backports. apt checks its signature.
func Debian(ctx context.Context, cfg Config) (Installed, error) {
	return install(ctx, cfg, "Debian bookworm-backports", fromDebian)
}

// Newest builds the newest version that the Go module proxy knows.
func Newest(ctx context.Context, cfg Config) (Installed, error) {
	return install(ctx, cfg, "the newest source, gvisor.dev/gvisor@latest", fromSource)
}

// stagingPrefix starts the names of staging directories.
const stagingPrefix = ".install-"

// staleAfter is the age from which on a staging directory is a crash's: no
// installation takes nearly as long.
const staleAfter = 6 * time.Hour

// job is one installation on its way.
type job struct {
	cfg Config
	dir string // the staging directory
}

func (j *job) step(text string, fraction float64) {
	if j.cfg.Progress != nil {
		j.cfg.Progress(text, fraction)
	}
}

// program is where the job puts the program.
func (j *job) program() string { return filepath.Join(j.dir, "libexec", Name) }

// install runs get, which makes j.program, and takes that if it is good.
func install(ctx context.Context, cfg Config, source string, get func(context.Context, *job) error) (_ Installed, err error) {
	libexec := filepath.Join(cfg.DataDir, "libexec")
	if err := os.MkdirAll(libexec, 0o755); err != nil {
		return Installed{}, classify(fmt.Errorf("install runsc: %w", err))
	}
	removeStale(libexec)
	j := &job{cfg: cfg}
	if j.dir, err = os.MkdirTemp(libexec, stagingPrefix); err != nil {
		return Installed{}, classify(fmt.Errorf("install runsc: %w", err))
	}
	defer func() {
		if rmErr := removeAll(j.dir); rmErr != nil {
			err = errors.Join(err, fmt.Errorf("remove %s: %w", j.dir, rmErr))
		}
	}()
	if err := os.Mkdir(filepath.Join(j.dir, "libexec"), 0o755); err != nil {
		return Installed{}, fmt.Errorf("install runsc: %w", err)
	}
	if err := get(ctx, j); err != nil {
		if ctx.Err() != nil {
			err = ctx.Err()
		}
		return Installed{}, fmt.Errorf("install runsc from %s: %w", source, err)
	}
	j.step("checking that it answers", -1)
	version, err := cfg.Check(j.dir)
	if err != nil {
		return Installed{}, fmt.Errorf("install runsc from %s: %w", source, err)
	}
	goal := filepath.Join(libexec, Name)
	if err := j.publish(goal); err != nil {
		return Installed{}, err
	}
	return Installed{Path: goal, Version: version, Source: source}, nil
}

// publish puts the program in its place, for good.
func (j *job) publish(goal string) error {
	err := os.Chmod(j.program(), 0o755)
	if err == nil {
		err = syncPath(j.program())
	}
	if err == nil {
		err = os.Rename(j.program(), goal)
	}
	if err == nil {
		err = syncPath(filepath.Dir(goal))
	}
	if err != nil {
		return fmt.Errorf("put runsc in place: %w", err)
	}
	return nil
}

func syncPath(path string) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	return errors.Join(f.Sync(), f.Close())
}

// removeStale removes what crashes left. What cannot be removed does no harm.
func removeStale(libexec string) {
	entries, _ := os.ReadDir(libexec)
	for _, e := range entries {
		info, err := e.Info()
		if err == nil && strings.HasPrefix(e.Name(), stagingPrefix) && time.Since(info.ModTime()) > staleAfter {
			_ = removeAll(filepath.Join(libexec, e.Name()))
		}
	}
}

// removeAll removes a tree whose directories may be read-only, as those of Go's
// module cache are.
func removeAll(dir string) error {
	_ = filepath.WalkDir(dir, func(path string, d os.DirEntry, err error) error {
		if err == nil && d.IsDir() {
			_ = os.Chmod(path, 0o700) // what stays closed fails below
		}
		return nil
	})
	return os.RemoveAll(dir)
}

func classify(err error) error {
	if errors.Is(err, os.ErrPermission) {
		return errdefs.WithHint(errdefs.As(errdefs.ErrPermission, err), "run it as the user that owns the data directory")
	}
	return err
}
