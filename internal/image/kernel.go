package image

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"time"

	"forkd.dev/forkd/internal/errdefs"
	"forkd.dev/forkd/internal/image/kernel"
)

const (
	kernelFormat = 1
	kernelFile   = "kernel.json"
	vmlinuxFile  = "vmlinux"
	modulesDir   = "modules"

	maxBzImage = 256 << 20
)

// Kernel is a guest kernel with the modules its initramfs gets. Its digest is the
// SHA-256 of the lines "SHA256  FILE" of vmlinux and the modules in load order.
type Kernel struct {
	Digest    string       `json:"digest"`
	Release   string       `json:"release"` // as uname -r prints it
	Package   string       `json:"package"`
	Version   string       `json:"version"` // of the package
	Vmlinux   KernelPart   `json:"vmlinux"`
	Modules   []KernelPart `json:"modules"` // in load order
	CreatedAt time.Time    `json:"created_at"`
}

// KernelPart is one file of a kernel, by its path in the kernel's directory.
type KernelPart struct {
	File   string `json:"file"`
	SHA256 string `json:"sha256"`
}

// EnsureKernel returns the newest guest kernel of the store; if there is none, it
// fetches Debian's cloud kernel with apt, without installing it.
func (s *Store) EnsureKernel(ctx context.Context, progress Progress) (Kernel, error) {
	if progress == nil {
		progress = func(string, float64) {}
	}
	if err := s.kernelWork.acquire(ctx); err != nil {
		return Kernel{}, fmt.Errorf("get guest kernel: %w", err)
	}
	defer s.kernelWork.release()
	k, err := s.newestKernel()
	if errors.Is(err, errdefs.ErrNotFound) {
		k, err = s.fetchKernel(ctx, progress)
	}
	if err != nil {
		return Kernel{}, fmt.Errorf("get guest kernel: %w", err)
	}
	return k, nil
}

func (s *Store) kernelDir(digest string) string { return filepath.Join(s.cfg.KernelDir, digest) }

func (s *Store) newestKernel() (Kernel, error) {
	entries, err := os.ReadDir(s.cfg.KernelDir)
	if err != nil {
		return Kernel{}, classify(fmt.Errorf("list kernels: %w", err))
	}
	var newest Kernel
	for _, e := range entries {
		if !isDigest(e.Name()) {
			continue
		}
		k, err := s.readKernel(e.Name())
		if err != nil {
			s.cfg.Log("kernel %s is left out: %v", e.Name(), err)
			continue
		}
		if k.Package == "" {
			continue // a named one is used only by who names it
		}
		if newest.Digest == "" || k.CreatedAt.After(newest.CreatedAt) {
			newest = k
		}
	}
	if newest.Digest == "" {
		return Kernel{}, errdefs.New(errdefs.ErrNotFound, "no guest kernel was fetched yet")
	}
	return newest, nil
}

// openKernel is readKernel for calls that must be fast: a kernel does not change.
func (s *Store) openKernel(digest string) (Kernel, error) {
	s.mu.Lock()
	k, ok := s.kernels[digest]
	s.mu.Unlock()
	if _, err := os.Lstat(filepath.Join(s.kernelDir(digest), vmlinuxFile)); ok && err == nil {
		return k, nil
	}
	k, err := s.readKernel(digest)
	if err != nil {
		return Kernel{}, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.kernels[digest] = k
	return k, nil
}

// readKernel reads the description of a stored kernel and checks that its files
// are there; their content was checked when it was stored.
func (s *Store) readKernel(digest string) (Kernel, error) {
	dir := s.kernelDir(digest)
	var k Kernel
	if err := readSealed(filepath.Join(dir, kernelFile), kernelFormat, &k); err != nil {
		return Kernel{}, err
	}
	if k.Digest != digest || digestParts(k.parts()) != digest {
		return Kernel{}, errdefs.New(errdefs.ErrCorrupt, "kernel %s: its description is of another", digest)
	}
	for _, p := range k.parts() {
		if !filepath.IsLocal(p.File) {
			return Kernel{}, errdefs.New(errdefs.ErrCorrupt, "kernel %s: file name %.80q", digest, p.File)
		}
		if info, err := os.Lstat(filepath.Join(dir, p.File)); err != nil || !info.Mode().IsRegular() {
			return Kernel{}, errdefs.New(errdefs.ErrCorrupt, "kernel %s: %s is missing", digest, p.File)
		}
	}
	return k, nil
}

func (k Kernel) parts() []KernelPart { return append([]KernelPart{k.Vmlinux}, k.Modules...) }

func digestParts(parts []KernelPart) string {
	h := sha256.New()
	for _, p := range parts {
		fmt.Fprintf(h, "%s  %s\n", p.SHA256, p.File)
	}
	return hex.EncodeToString(h.Sum(nil))
}

func (s *Store) fetchKernel(ctx context.Context, progress Progress) (Kernel, error) {
	if runtime.GOARCH != "amd64" {
		return Kernel{}, errdefs.New(errdefs.ErrUnsupported, "guest kernels exist for amd64 only, not for %s", runtime.GOARCH)
	}
	deb, err := s.downloadKernel(ctx, progress)
	if err != nil {
		return Kernel{}, err
	}
	progress("unpacking the guest kernel", 0.6)
	tmp, err := os.MkdirTemp(s.cfg.KernelDir, tempPrefix)
	if err != nil {
		return Kernel{}, classify(err)
	}
	defer os.RemoveAll(tmp)
	tree, whole := filepath.Join(tmp, "package"), filepath.Join(tmp, "kernel")
	if _, err := run(ctx, command{name: "dpkg-deb", args: []string{"--extract", deb.path, tree}}); err != nil {
		return Kernel{}, explainUnpack(err)
	}
	k := Kernel{Package: deb.name, Version: deb.version, CreatedAt: s.cfg.Now().UTC()}
	if err := storeKernel(ctx, tree, whole, &k); err != nil {
		return Kernel{}, fmt.Errorf("take apart %s: %w", deb.name, err)
	}
	final := s.kernelDir(k.Digest)
	if err := os.RemoveAll(final); err != nil { // a damaged one; whole ones are found before
		return Kernel{}, fmt.Errorf("replace damaged kernel: %w", err)
	}
	if err := publish(whole, final); err != nil {
		return Kernel{}, err
	}
	progress("guest kernel is ready", 1)
	return k, nil
}

func explainUnpack(err error) error {
	if diskFull.MatchString(tailOf(err)) {
		return diskIsFull(err)
	}
	return err
}

// storeKernel takes vmlinux and the modules out of the unpacked package at tree,
// puts them into the new directory dir, synced, and fills in k.
func storeKernel(ctx context.Context, tree, dir string, k *Kernel) error {
	release, image, err := readBzImage(tree)
	if err != nil {
		return err
	}
	k.Release = release
	vmlinux, err := kernel.Vmlinux(ctx, image)
	if err != nil {
		return err
	}
	modules, err := kernel.Modules(ctx, moduleTree(tree, release), kernel.GuestModules())
	if err != nil {
		return err
	}
	return writeKernel(dir, vmlinux, modules, k)
}

// writeKernel puts a kernel into the new directory dir, synced, and fills in k.
func writeKernel(dir string, vmlinux []byte, modules []kernel.Module, k *Kernel) (err error) {
	if err := os.MkdirAll(filepath.Join(dir, modulesDir), 0o755); err != nil {
		return classify(err)
	}
	put := func(file string, data []byte) (KernelPart, error) {
		sum := sha256.Sum256(data)
		return KernelPart{file, hex.EncodeToString(sum[:])}, writeFile(filepath.Join(dir, file), data, 0o444)
	}
	if k.Vmlinux, err = put(vmlinuxFile, vmlinux); err != nil {
		return err
	}
	for i, m := range modules {
		part, err := put(filepath.Join(modulesDir, fmt.Sprintf("%02d-%s.ko", i, m.Name)), m.Data)
		if err != nil {
			return err
		}
		k.Modules = append(k.Modules, part)
	}
	k.Digest = digestParts(k.parts())
	data, err := seal(kernelFormat, k)
	if err != nil {
		return err
	}
	if err := writeFile(filepath.Join(dir, kernelFile), data, 0o444); err != nil {
		return err
	}
	return errors.Join(syncPath(filepath.Join(dir, modulesDir)), syncPath(dir))
}

// readBzImage returns the release and the content of the one kernel in tree.
func readBzImage(tree string) (release string, image []byte, err error) {
	root, err := os.OpenRoot(tree)
	if err != nil {
		return "", nil, fmt.Errorf("open package: %w", err)
	}
	defer root.Close()
	const prefix = "boot/vmlinuz-"
	found, err := fs.Glob(root.FS(), prefix+"*")
	if err != nil || len(found) != 1 {
		return "", nil, errdefs.New(errdefs.ErrCorrupt, "the package holds %d kernels, not one", len(found))
	}
	f, err := root.Open(found[0])
	if err != nil {
		return "", nil, fmt.Errorf("open kernel: %w", err)
	}
	defer f.Close()
	image, err = io.ReadAll(io.LimitReader(f, maxBzImage))
	if err != nil {
		return "", nil, fmt.Errorf("read kernel: %w", err)
	}
	return strings.TrimPrefix(found[0], prefix), image, nil
}

// moduleTree is where a package has its modules; newer ones do without the link
// from /lib to /usr/lib.
func moduleTree(tree, release string) string {
	merged := filepath.Join(tree, "usr/lib/modules", release)
	if _, err := os.Stat(merged); err == nil {
		return merged
	}
	return filepath.Join(tree, "lib/modules", release)
}
