package daemon

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"time"

	"forkd.dev/forkd/internal/engine"
	"forkd.dev/forkd/internal/engine/gvisor"
	"forkd.dev/forkd/internal/errdefs"
	"forkd.dev/forkd/internal/linux"
	"forkd.dev/forkd/internal/programs"
	"forkd.dev/forkd/internal/sandbox"
)

// proofPatience bounds a proof, which takes about a second on a quiet host.
const proofPatience = time.Minute

// proveGVisor captures and restores a sandbox of nothing but our agent, unless that
// was done before with the same runsc on the same kernel.
func proveGVisor(ctx context.Context, s engineSetup, d engine.Driver) error {
	runsc, _, err := gvisor.FindRunsc(s.dataDir)
	if err != nil {
		return err
	}
	key, err := gvisorKey(runsc)
	if err != nil {
		return err
	}
	return remembered(ctx, filepath.Join(s.dataDir, "engine", gvisor.Name), key, func(ctx context.Context) error {
		ctx, cancel := context.WithTimeout(ctx, proofPatience)
		defer cancel()
		dir := filepath.Join(s.dir, "proof")
		if err := os.Mkdir(dir, 0o755); err != nil {
			return fmt.Errorf("make a directory: %w", err)
		}
		tree, err := emptyTree(ctx, dir)
		if err != nil {
			return err
		}
		return errdefs.WithHint(sandbox.Prove(ctx, sandbox.Proof{
			Engine: d, Connect: connect, Dir: dir, Root: engine.Root{Tree: tree}, Shape: engine.Shape{CPUs: 1, MemoryMiB: 128, DiskMiB: 64},
		}), "get another runsc with: forkd engine install gvisor (or --newest)")
	})
}

func gvisorKey(runsc string) (proofKey, error) {
	digest, err := programDigest(runsc)
	if err != nil {
		return proofKey{}, err
	}
	kernel, err := linux.KernelRelease()
	if err != nil {
		return proofKey{}, err
	}
	agent, err := programs.Agent()
	if err != nil {
		return proofKey{}, err
	}
	return proofKey{Program: digest, Kernel: kernel, Agent: programs.Digest(agent), UID: os.Geteuid()}, nil
}

// emptyTree makes a root file system with nothing but places to mount on.
func emptyTree(ctx context.Context, dir string) (string, error) {
	root, file := filepath.Join(dir, "root"), filepath.Join(dir, "tree.erofs")
	for _, name := range []string{".forkd", "dev", "etc", "proc", "root", "run", "sys", "tmp", "var"} {
		if err := os.MkdirAll(filepath.Join(root, name), 0o755); err != nil {
			return "", fmt.Errorf("make an empty tree: %w", err)
		}
	}
	out, err := exec.CommandContext(ctx, "mkfs.erofs", "--quiet", "--all-root", file, root).CombinedOutput()
	if err != nil {
		return "", errdefs.WithHint(errdefs.New(errdefs.ErrUnavailable, "make an empty tree with mkfs.erofs: %v: %.200s", err, out),
			"apt-get install --no-install-recommends erofs-utils")
	}
	if err := os.Chmod(file, 0o444); err != nil {
		return "", fmt.Errorf("make an empty tree: %w", err)
	}
	return file, nil
}
