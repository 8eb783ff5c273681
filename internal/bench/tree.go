package bench

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"

	"forkd.dev/forkd/internal/errdefs"
)

// nobody is the user of the plain processes.
const nobody = 65534

// imageTree is a copy of an image's files on the host, for the baselines: the same
// Python, numpy and C library as in the guests. It is read out of the disk image by
// debugfs, so the kernel of the host mounts nothing. Programs of an image are run
// on the host only if Debian signed them.
type imageTree struct {
	temp   *tempDir
	dir    string // its path; it holds the next two
	root   string
	bundle string // of runc, with its state beside it
	image  string // for people
	runc   string // path of the program, once looked for
	mark   string
}

// copyImage copies the files of the subject's image. The error is a [skip] if that
// is not possible here.
func copyImage(ctx context.Context, s *subject) (_ *imageTree, err error) {
	disk, err := findDisk(ctx, s)
	if err != nil {
		return nil, err
	}
	tool, err := exec.LookPath("debugfs")
	if err != nil {
		return nil, &skip{"debugfs is not installed (apt-get install e2fsprogs)"}
	}
	t := &imageTree{image: s.detail.Image, mark: s.mark}
	if t.temp, err = newTempDir(s.cfg.TempDir); err != nil {
		return nil, fmt.Errorf("make a directory for the baselines: %w", err)
	}
	t.dir = t.temp.path
	defer func() {
		if err != nil {
			err = errors.Join(err, t.remove(ctx))
		}
	}()
	t.root, t.bundle = filepath.Join(t.dir, "root"), filepath.Join(t.dir, "bundle")
	if err := errors.Join(os.Mkdir(t.root, 0o755), os.Mkdir(t.bundle, 0o700), os.Chmod(t.dir, 0o711)); err != nil {
		return nil, fmt.Errorf("make a directory for the baselines: %w", err)
	}
	// A path with a space or a quote would be read by debugfs as something else.
	if strings.ContainsAny(t.root, " \t\"'\\") {
		return nil, &skip{"the temporary directory has a name that debugfs cannot take"}
	}
	out, err := exec.CommandContext(ctx, tool, "-R", "rdump / "+t.root, disk).CombinedOutput()
	if err == nil {
		_, err = os.Stat(filepath.Join(t.root, "usr/bin/python3"))
	}
	if ctx.Err() != nil {
		return nil, ctx.Err()
	}
	if err != nil {
		return nil, fmt.Errorf("copy files of image %s: %w: %.300s", t.image, err, out)
	}
	return t, nil
}

// findDisk returns the disk of the subject's image, if the daemon is on this host
// and its content may be run here.
func findDisk(ctx context.Context, s *subject) (string, error) {
	if os.Geteuid() != 0 {
		return "", &skip{"needs root, to run the Python of the image on the host"}
	}
	if s.detail.ImageID == "" || s.detail.Dir == "" {
		return "", &skip{"the daemon does not tell the snapshot's image"}
	}
	img, err := s.cfg.Client.Image(ctx, s.detail.ImageID)
	if err != nil {
		return "", fmt.Errorf("look at image %s: %w", s.detail.ImageID, err)
	}
	if !strings.HasPrefix(img.Source, "debian:") {
		return "", &skip{fmt.Sprintf("image %s is not made of Debian packages, so its programs are not run on the host", img.Name)}
	}
	disk := filepath.Join(filepath.Dir(filepath.Dir(s.detail.Dir)), "images", filepath.Base(img.ID), "disk.ext4")
	if _, err := os.Stat(disk); err != nil {
		return "", &skip{"the image's disk is not on this host"}
	}
	return disk, nil
}

// remove deletes the copy, and containers that are left, also if ctx has ended.
func (t *imageTree) remove(ctx context.Context) error {
	err := t.endContainers(ctx)
	if rmErr := t.temp.remove(); rmErr != nil {
		err = errors.Join(err, fmt.Errorf("remove the copy of the image: %w", rmErr))
	}
	return err
}

func (t *imageTree) processHow() string {
	return fmt.Sprintf("/usr/bin/python3 of image %s by chroot into a copy of it, as nobody, as many at a time as processors", t.image)
}

// processes returns plain processes: chroot and nothing else.
func (t *imageTree) processes() command {
	return func(ctx context.Context, _ int) *exec.Cmd {
		cmd := exec.CommandContext(ctx, "/usr/bin/python3", "-c", pythonCode)
		cmd.Dir, cmd.Env = "/", baselineEnv()
		cmd.SysProcAttr = &syscall.SysProcAttr{Chroot: t.root, Credential: &syscall.Credential{Uid: nobody, Gid: nobody}, Setpgid: true}
		return cmd
	}
}

func (t *imageTree) state() string { return filepath.Join(t.dir, "runc") }

// containers returns containers with runc's own default settings, on a read-only
// root of the same files.
func (t *imageTree) containers(ctx context.Context) (command, error) {
	path, err := exec.LookPath("runc")
	if err != nil {
		return nil, &skip{"runc is not installed (apt-get install runc)"}
	}
	t.runc = path
	if out, err := exec.CommandContext(ctx, path, "spec", "--bundle", t.bundle).CombinedOutput(); err != nil {
		return nil, fmt.Errorf("runc spec: %w: %.300s", err, out)
	}
	if err := t.setBundle(); err != nil {
		return nil, err
	}
	return func(ctx context.Context, i int) *exec.Cmd {
		cmd := exec.CommandContext(ctx, path, "--root", t.state(), "run", "--bundle", t.bundle, fmt.Sprintf("forkd-bench-%s-%d", t.mark, i))
		// Let runc end the container; what it leaves is removed by name.
		cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGTERM) }
		return cmd
	}, nil
}

// setBundle changes what must differ in the settings that runc proposes.
func (t *imageTree) setBundle() error {
	path := filepath.Join(t.bundle, "config.json")
	raw, err := os.ReadFile(path)
	if err != nil {
		return fmt.Errorf("read runc's settings: %w", err)
	}
	var config map[string]any
	if err := json.Unmarshal(raw, &config); err != nil {
		return fmt.Errorf("read runc's settings: %w", err)
	}
	process, ok := config["process"].(map[string]any)
	if !ok {
		return errdefs.New(errdefs.ErrInternal, "runc's settings have no process")
	}
	process["terminal"] = false
	process["args"] = []string{"/usr/bin/python3", "-c", pythonCode}
	process["env"] = baselineEnv()
	config["root"] = map[string]any{"path": t.root, "readonly": true}
	if raw, err = json.Marshal(config); err != nil {
		return fmt.Errorf("write runc's settings: %w", err)
	}
	if err := os.WriteFile(path, raw, 0o600); err != nil {
		return fmt.Errorf("write runc's settings: %w", err)
	}
	return nil
}

// runcHow says what the containers are.
func (t *imageTree) runcHow(ctx context.Context) string {
	if t.runc == "" {
		return ""
	}
	out, err := exec.CommandContext(ctx, t.runc, "--version").Output()
	version, _, _ := strings.Cut(string(out), "\n")
	if err != nil || version == "" {
		version = "runc"
	}
	return fmt.Sprintf("%s run with its default settings on a read-only copy of image %s, as many at a time as processors", version, t.image)
}

// endContainers removes containers that a canceled run left.
func (t *imageTree) endContainers(ctx context.Context) error {
	if t.runc == "" {
		return nil
	}
	entries, err := os.ReadDir(t.state())
	if err != nil {
		return nil // none was made
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), cleanUpTime)
	defer cancel()
	var errs []error
	for _, e := range entries {
		if out, err := exec.CommandContext(ctx, t.runc, "--root", t.state(), "delete", "--force", e.Name()).CombinedOutput(); err != nil {
			errs = append(errs, fmt.Errorf("remove container %s: %w: %.200s", e.Name(), err, out))
		}
	}
	return errors.Join(errs...)
}
