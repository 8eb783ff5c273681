package gvisor

import (
	"context"
	"debug/buildinfo"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"time"

	"forkd.dev/forkd/internal/errdefs"
)

// MinVersion is the day of the oldest runsc this engine was tested with, as its
// version carries it: the one in Debian's bookworm-backports. The one in bookworm
// (20221219) cannot checkpoint on the systrap platform.
const MinVersion = "20240729"

// moduleName is what a runsc that was built with the go command says it is of.
const moduleName = "gvisor.dev/gvisor"

// installHint tells how to get a runsc that will do.
const installHint = "get one with: forkd engine install gvisor"

// LocalRunsc is where `forkd engine install gvisor` puts a program that it built.
func LocalRunsc(dataDir string) string { return filepath.Join(dataDir, "libexec", "runsc") }

// FindRunsc returns the runsc to use: the one in dataDir/libexec, else the one in
// PATH, and its version, which holds its day. ErrUnavailable: there is none, it
// does not run, or it is older than MinVersion.
func FindRunsc(dataDir string) (path, version string, err error) {
	path = LocalRunsc(dataDir)
	if _, err := os.Stat(path); errors.Is(err, fs.ErrNotExist) {
		if path, err = exec.LookPath("runsc"); err != nil {
			return "", "", errdefs.WithHint(errdefs.New(errdefs.ErrUnavailable, "runsc is not installed"), installHint)
		}
	}
	version, err = checkRunsc(path)
	return path, version, err
}

// checkRunsc returns the version of a program, if it is a runsc that is new enough.
func checkRunsc(path string) (string, error) {
	version, err := runscVersion(path, versionPatience)
	if err != nil {
		return "", errdefs.WithHint(errdefs.New(errdefs.ErrUnavailable, "%s does not work: %w", path, err), installHint)
	}
	day := versionDay.FindString(version)
	if day == "" {
		return "", errdefs.WithHint(errdefs.New(errdefs.ErrUnavailable, "%s does not say its version (it says %.80q), %s or newer is needed", path, version, MinVersion), installHint)
	}
	if day < MinVersion {
		return "", errdefs.WithHint(errdefs.New(errdefs.ErrUnavailable, "%s has version %s, %s or newer is needed", path, version, MinVersion), installHint)
	}
	return version, nil
}

// versionDay finds the day in every form that versions of runsc have had:
// release-20240729.0, 0.0~20240729.0, v0.0.0-20260905035102-160fafc42237.
var versionDay = regexp.MustCompile(`20[0-9]{2}(0[1-9]|1[0-2])[0-3][0-9]`)

// versionPatience is how long a program may take to say its version.
const versionPatience = 10 * time.Second

// runscVersion asks the program. One built by the go command only does not know;
// what it was built of stands in the file.
func runscVersion(path string, patience time.Duration) (string, error) {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	cmd := exec.CommandContext(ctx, path, "--version")
	cmd.WaitDelay = time.Second // a child of it may hold its output open
	out, err := cmd.Output()
	if ctx.Err() != nil {
		return "", errdefs.New(errdefs.ErrTimeout, "it did not answer --version within %v", patience)
	}
	if err != nil {
		return "", fmt.Errorf("run it with --version: %w", err)
	}
	first, _, _ := strings.Cut(string(out), "\n")
	version, ok := strings.CutPrefix(strings.TrimSpace(first), "runsc version ")
	if !ok {
		return "", errdefs.New(errdefs.ErrInvalid, "it is no runsc: it answers %.80q to --version", first)
	}
	if versionDay.MatchString(version) {
		return version, nil
	}
	info, err := buildinfo.ReadFile(path)
	if err != nil {
		return version, nil
	}
	for _, m := range append(info.Deps, &info.Main) {
		if m.Path == moduleName && versionDay.MatchString(m.Version) {
			return m.Version, nil
		}
	}
	return version, nil
}
