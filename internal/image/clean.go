package image

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"strings"
	"syscall"

	"forkd.dev/forkd/internal/errdefs"
)

// guestHostname is the host name of an image; a fork gets its own.
const guestHostname = "forkd"

func guestHosts() string {
	return "127.0.0.1\tlocalhost\n127.0.1.1\t" + guestHostname + "\n::1\tlocalhost ip6-localhost ip6-loopback\n"
}

// cleanTree removes from a root file system what belongs to this host or to the
// build, and sets what is common to all images. All paths stay inside of dir,
// whatever links the tree holds.
func cleanTree(dir string) error {
	root, err := os.OpenRoot(dir)
	if err != nil {
		return fmt.Errorf("clean root file system: %w", err)
	}
	defer root.Close()
	for _, step := range []func(*os.Root) error{emptyDirs, removeFiles, writeFiles} {
		if err := step(root); err != nil {
			return classify(fmt.Errorf("clean root file system: %w", err))
		}
	}
	return nil
}

// emptyDirs empties directories of caches, logs and temporary files.
func emptyDirs(root *os.Root) error {
	for _, dir := range []string{
		"tmp", "run", "var/tmp", "var/cache/apt", "var/lib/apt/lists", "var/log/apt", "var/cache/ldconfig",
	} {
		d, err := root.Open(dir)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return err
		}
		entries, err := d.ReadDir(-1)
		if err = errors.Join(err, d.Close()); err != nil {
			return err
		}
		for _, e := range entries {
			if err := root.RemoveAll(path.Join(dir, e.Name())); err != nil {
				return err
			}
		}
	}
	// apt needs these two to exist.
	for _, dir := range []string{"var/cache/apt/archives/partial", "var/lib/apt/lists/partial"} {
		if err := root.MkdirAll(dir, 0o755); err != nil {
			return err
		}
	}
	return nil
}

func removeFiles(root *os.Root) error {
	for _, name := range []string{
		"var/lib/dbus/machine-id", "var/log/dpkg.log", "var/log/alternatives.log", "var/log/bootstrap.log",
		"var/lib/dpkg/status-old", "var/cache/debconf/config.dat-old", "var/cache/debconf/templates.dat-old",
		"var/lib/systemd/random-seed",
		"etc/apt/apt.conf.d/99mmdebstrap", "etc/dpkg/dpkg.cfg.d/99mmdebstrap",
		"etc/passwd-", "etc/group-", "etc/shadow-", "etc/gshadow-",
	} {
		if err := ignoreMissing(root.Remove(name)); err != nil {
			return err
		}
	}
	// Every machine must make its own host keys.
	keys, err := fs.Glob(root.FS(), "etc/ssh/ssh_host_*")
	if err != nil {
		return err
	}
	for _, key := range keys {
		if err := root.Remove(key); err != nil {
			return err
		}
	}
	return nil
}

func writeFiles(root *os.Root) error {
	files := []struct{ name, text string }{
		{"etc/hostname", guestHostname + "\n"},
		{"etc/hosts", guestHosts()},
		{"etc/resolv.conf", ""},
		{"etc/machine-id", ""},
	}
	if _, err := root.Stat("etc/apt"); err == nil {
		// The mirrors of this host are none of the guest's business.
		keyring := ""
		if _, err := root.Stat(strings.TrimPrefix(debianKeyring, "/")); err == nil {
			keyring = debianKeyring
		}
		lines := defaultMirrors().lines(debianSuite, keyring)
		files = append(files,
			struct{ name, text string }{"etc/apt/sources.list", strings.Join(lines, "\n") + "\n"},
			struct{ name, text string }{"etc/dpkg/dpkg.cfg.d/forkd", strings.Join(dpkgTrimming(), "\n") + "\n"})
	}
	for _, f := range files {
		if err := root.MkdirAll(path.Dir(f.name), 0o755); err != nil {
			return err
		}
		// A link, even a dangling one to where a service would write, is replaced.
		if err := ignoreMissing(root.Remove(f.name)); err != nil {
			return err
		}
		if err := root.WriteFile(f.name, []byte(f.text), 0o644); err != nil {
			return err
		}
		if err := root.Chmod(f.name, 0o644); err != nil {
			return err
		}
	}
	return nil
}

// treeSize is what a tree takes on an ext4 disk.
type treeSize struct {
	bytes  int64
	inodes int64
}

// measureTree adds up the blocks and inodes under dir, hard links counted once.
func measureTree(dir string) (treeSize, error) {
	var size treeSize
	seen := map[uint64]bool{}
	err := fs.WalkDir(os.DirFS(dir), ".", func(name string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		info, err := d.Info()
		if err != nil {
			return err
		}
		st, ok := info.Sys().(*syscall.Stat_t)
		if !ok {
			return errdefs.New(errdefs.ErrInternal, "no status of %s", name)
		}
		if st.Nlink > 1 && !d.IsDir() {
			if seen[st.Ino] {
				return nil
			}
			seen[st.Ino] = true
		}
		size.inodes++
		size.bytes += st.Blocks * 512
		return nil
	})
	if err != nil {
		return treeSize{}, fmt.Errorf("measure root file system: %w", err)
	}
	return size, nil
}
