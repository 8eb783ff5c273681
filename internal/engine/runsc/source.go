package runsc

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	"forkd.dev/forkd/internal/errdefs"
)

// Where runsc's source is.
const (
	module      = "gvisor.dev/gvisor"
	mainPackage = module + "/runsc"
	// versionVariable is set by gVisor's own build, and unset by the go command's.
	versionVariable = module + "/runsc/version.version"
)

// fromSource builds the newest version. The module proxy and the checksum database
// of the go command are used as they are set up on this host.
func fromSource(ctx context.Context, j *job) error {
	if _, err := exec.LookPath("go"); err != nil {
		return errdefs.WithHint(errdefs.New(errdefs.ErrUnavailable, "there is no Go toolchain to build it with"),
			"install Go 1.26 or newer, or take Debian's package: forkd engine install gvisor")
	}
	src, tmp := filepath.Join(j.dir, "src"), filepath.Join(j.dir, "tmp")
	for _, d := range []string{src, tmp} {
		if err := os.Mkdir(d, 0o755); err != nil {
			return fmt.Errorf("prepare the build: %w", err)
		}
	}
	g := builder{job: j, dir: src, env: []string{"GOFLAGS=-mod=mod", "GOWORK=off", "CGO_ENABLED=0", "GOTMPDIR=" + tmp, "TMPDIR=" + tmp, "GOOS=linux", "GOARCH=amd64"}}
	if _, err := g.run(ctx, nil, "mod", "init", "runsc.invalid/build"); err != nil {
		return err
	}
	j.step("looking for the newest gVisor", -1)
	if _, err := g.run(ctx, nil, "get", module+"@latest"); err != nil {
		return err
	}
	out, err := g.run(ctx, nil, "list", "-m", "-f", "{{.Version}}", module)
	if err != nil {
		return err
	}
	version := strings.TrimSpace(out)
	out, err = g.run(ctx, nil, "list", "-deps", mainPackage)
	if err != nil {
		return err
	}
	return g.build(ctx, version, strings.Count(out, "\n"))
}

// builder runs the go command in a module of its own.
type builder struct {
	*job
	dir string
	env []string
}

func (g builder) run(ctx context.Context, onLine func(string) bool, args ...string) (string, error) {
	return tool{name: "go", args: args, dir: g.dir, env: g.env, onLine: onLine}.run(ctx)
}

// build compiles the program. The go command names each package that it compiles.
func (g builder) build(ctx context.Context, version string, packages int) error {
	text := "building runsc " + version
	g.step(text, 0)
	done := 0
	told := func(line string) bool {
		if strings.HasPrefix(line, "#") || strings.ContainsAny(line, " \t") {
			return false // an error, not a package
		}
		done++
		g.step(text, min(float64(done)/float64(max(packages, 1)), 1))
		return true
	}
	_, err := g.run(ctx, told, "build", "-v", "-trimpath", "-buildvcs=false",
		"-ldflags", "-s -w -X "+versionVariable+"="+version, "-o", g.program(), mainPackage)
	return err
}
