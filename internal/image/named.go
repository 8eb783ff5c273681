package image

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"forkd.dev/forkd/internal/errdefs"
	"forkd.dev/forkd/internal/ident"
	"forkd.dev/forkd/internal/image/kernel"
	"forkd.dev/forkd/internal/image/rootfs"
)

// Kernels that users bring. One is an object like any other kernel, addressed by
// the digest of its files, with a name in names.json of the kernel directory.
// Debian's, which images get that ask for none, has no name.

const (
	kernelNamesFormat = 1
	maxKernelEntries  = 50_000
	maxKernelBytes    = 2 << 30
)

// NamedKernel is a kernel as users see it.
type NamedKernel struct {
	Name    string // "" of Debian's
	Kernel  Kernel
	Default bool     // images get it that ask for none
	Bytes   int64    // of its files
	UsedBy  []string // image ids
}

func (s *Store) kernelNamesFile() string { return filepath.Join(s.cfg.KernelDir, "names.json") }

func (s *Store) kernelNames() (map[string]string, error) {
	names := map[string]string{}
	err := readSealed(s.kernelNamesFile(), kernelNamesFormat, &names)
	if errors.Is(err, fs.ErrNotExist) {
		return names, nil
	}
	if err != nil {
		return nil, fmt.Errorf("read kernel names: %w", err)
	}
	for name, digest := range names {
		if ident.CheckTag(name) != nil || !isDigest(digest) {
			return nil, errdefs.New(errdefs.ErrCorrupt, "read kernel names: entry %.80q: %.80q", name, digest)
		}
	}
	return names, nil
}

// Kernels lists the kernels of the store, Debian's first.
func (s *Store) Kernels(ctx context.Context) ([]NamedKernel, error) {
	if err := s.kernelWork.acquire(ctx); err != nil {
		return nil, err
	}
	defer s.kernelWork.release()
	names, err := s.kernelNames()
	if err != nil {
		return nil, err
	}
	var out []NamedKernel
	def, err := s.newestKernel()
	if err != nil && !errors.Is(err, errdefs.ErrNotFound) {
		return nil, err
	}
	if err == nil {
		out = append(out, s.view("", def))
		out[0].Default = true
	}
	for _, name := range slices.Sorted(maps.Keys(names)) {
		k, err := s.readKernel(names[name])
		if err != nil {
			return nil, fmt.Errorf("read kernel %s: %w", name, err)
		}
		out = append(out, s.view(name, k))
	}
	return out, nil
}

func (s *Store) view(name string, k Kernel) NamedKernel {
	out := NamedKernel{Name: name, Kernel: k, UsedBy: s.kernelUsers(k.Digest)}
	for _, p := range k.parts() {
		if info, err := os.Lstat(filepath.Join(s.kernelDir(k.Digest), p.File)); err == nil {
			out.Bytes += info.Size()
		}
	}
	return out
}

func (s *Store) kernelUsers(digest string) []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	var out []string
	for id, img := range s.images {
		if img.KernelDigest == digest {
			out = append(out, id)
		}
	}
	slices.Sort(out)
	return out
}

// kernelFor returns the kernel that an image asks for by name, "" being Debian's.
func (s *Store) kernelFor(ctx context.Context, name string, progress Progress) (Kernel, error) {
	if name == "" {
		return s.EnsureKernel(ctx, progress)
	}
	if err := s.kernelWork.acquire(ctx); err != nil {
		return Kernel{}, err
	}
	defer s.kernelWork.release()
	names, err := s.kernelNames()
	if err != nil {
		return Kernel{}, err
	}
	digest, ok := names[name]
	if !ok {
		return Kernel{}, errdefs.WithHint(errdefs.New(errdefs.ErrNotFound, "there is no kernel %.80q", name), "list them with: forkd kernel ls")
	}
	return s.readKernel(digest)
}

// AddKernel stores a kernel under a name, which must be free. The archive holds
// the file "kernel", an ELF vmlinux or a bzImage, and may hold the directory
// "modules" with what lies in lib/modules/RELEASE. Without modules the kernel must
// have the drivers of a guest built in. It need not be trusted: it runs in guests only.
func (s *Store) AddKernel(ctx context.Context, name string, archive io.Reader) (NamedKernel, error) {
	fail := func(err error) (NamedKernel, error) {
		return NamedKernel{}, fmt.Errorf("add kernel %.80s: %w", name, err)
	}
	if err := ident.CheckTag(name); err != nil {
		return fail(err)
	}
	tmp, err := os.MkdirTemp(s.cfg.KernelDir, tempPrefix)
	if err != nil {
		return fail(classify(err))
	}
	defer os.RemoveAll(tmp)
	tree := filepath.Join(tmp, "upload")
	if err := os.Mkdir(tree, 0o700); err != nil {
		return fail(classify(err))
	}
	if _, err := rootfs.Extract(ctx, archive, tree, rootfs.Limits{Bytes: maxKernelBytes, Entries: maxKernelEntries}, func(int64) {}); err != nil {
		return fail(classify(err))
	}
	k := Kernel{CreatedAt: s.cfg.Now().UTC()}
	whole := filepath.Join(tmp, "kernel")
	if err := takeUpload(ctx, tree, whole, &k); err != nil {
		return fail(err)
	}
	if err := s.publishKernel(ctx, name, whole, k); err != nil {
		return fail(err)
	}
	return s.view(name, k), nil
}

// takeUpload makes the files of a kernel at dir from what was uploaded to tree.
func takeUpload(ctx context.Context, tree, dir string, k *Kernel) error {
	data, err := readBounded(filepath.Join(tree, "kernel"), kernel.MaxVmlinux)
	if err != nil {
		return errdefs.New(errdefs.ErrInvalid, "the archive has no file called kernel: %w", err)
	}
	if !bytes.HasPrefix(data, []byte("\x7fELF")) {
		if data, err = kernel.Vmlinux(ctx, data); err != nil {
			return errdefs.New(errdefs.ErrInvalid, "it is neither an ELF vmlinux nor a bzImage: %w", err)
		}
	}
	if k.Release = releaseOf(data); k.Release == "" {
		return errdefs.New(errdefs.ErrInvalid, "it does not say that it is Linux")
	}
	var modules []kernel.Module
	if info, err := os.Lstat(filepath.Join(tree, modulesDir)); err == nil && info.IsDir() {
		if modules, err = kernel.Modules(ctx, filepath.Join(tree, modulesDir), kernel.GuestModules()); err != nil {
			return errdefs.As(errdefs.ErrInvalid, err)
		}
	}
	return writeKernel(dir, data, modules, k)
}

var linuxVersion = regexp.MustCompile(`Linux version ([0-9][0-9A-Za-z.+~_-]{0,63}) `)

// releaseOf finds the release in the banner of an ELF kernel.
func releaseOf(vmlinux []byte) string {
	if m := linuxVersion.FindSubmatch(vmlinux); m != nil {
		return string(m[1])
	}
	return ""
}

// publishKernel puts a whole kernel in its place and gives it its name.
func (s *Store) publishKernel(ctx context.Context, name, whole string, k Kernel) error {
	if err := s.kernelWork.acquire(ctx); err != nil {
		return err
	}
	defer s.kernelWork.release()
	names, err := s.kernelNames()
	if err != nil {
		return err
	}
	if digest, taken := names[name]; taken && digest != k.Digest {
		return errdefs.WithHint(errdefs.New(errdefs.ErrConflict, "the name is taken by kernel %.12s", digest), "choose another, or remove that one with: forkd kernel rm %s", name)
	}
	if _, err := s.readKernel(k.Digest); err != nil {
		final := s.kernelDir(k.Digest)
		if err := os.RemoveAll(final); err != nil {
			return fmt.Errorf("replace damaged kernel: %w", err)
		}
		if err := publish(whole, final); err != nil {
			return err
		}
	}
	names[name] = k.Digest
	return s.storeKernelNames(names)
}

func (s *Store) storeKernelNames(names map[string]string) error {
	data, err := seal(kernelNamesFormat, names)
	if err == nil {
		err = replaceFile(s.kernelNamesFile(), data, 0o644)
	}
	if err != nil {
		return fmt.Errorf("store kernel names: %w", err)
	}
	return nil
}

// RemoveKernel removes a named kernel. One that an image uses is ErrConflict.
func (s *Store) RemoveKernel(ctx context.Context, name string) error {
	fail := func(err error) error { return fmt.Errorf("remove kernel %.80s: %w", name, err) }
	if err := s.building.acquire(ctx); err != nil { // no image that uses it appears meanwhile
		return fail(err)
	}
	defer s.building.release()
	if err := s.kernelWork.acquire(ctx); err != nil {
		return fail(err)
	}
	defer s.kernelWork.release()
	names, err := s.kernelNames()
	if err != nil {
		return fail(err)
	}
	digest, ok := names[name]
	if !ok {
		return errdefs.WithHint(errdefs.New(errdefs.ErrNotFound, "there is no kernel %.80q", name), "list them with: forkd kernel ls")
	}
	shared := false
	for other, d := range names {
		shared = shared || other != name && d == digest
	}
	if k, err := s.readKernel(digest); err == nil && k.Package != "" {
		shared = true // with Debian's, which stays
	}
	if users := s.kernelUsers(digest); len(users) > 0 && !shared {
		return errdefs.WithHint(errdefs.New(errdefs.ErrConflict, "kernel %s is used by images %s", name, strings.Join(users, ", ")),
			"remove them first with: forkd image rm")
	}
	delete(names, name)
	if err := s.storeKernelNames(names); err != nil {
		return fail(err)
	}
	if shared {
		return nil
	}
	s.mu.Lock()
	delete(s.kernels, digest)
	s.mu.Unlock()
	trash := filepath.Join(s.cfg.KernelDir, tempPrefix+"gone-"+digest)
	if err := publish(s.kernelDir(digest), trash); err != nil {
		return fail(err)
	}
	return os.RemoveAll(trash)
}
