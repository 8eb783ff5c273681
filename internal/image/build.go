package image

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"forkd.dev/forkd/internal/errdefs"
	"forkd.dev/forkd/internal/ident"
	"forkd.dev/forkd/internal/linux"
)

// BuildSpec asks for an image of Debian with packages, or of an archive.
type BuildSpec struct {
	Name     string
	Replace  bool // move the name if it is taken
	Packages []string
	DiskMiB  int // 0 means 4096
	Builtin  bool
	// Tar is a root file system in a tar archive, plain or compressed by gzip, zstd or
	// xz, instead of Debian; it may be nil. It need not be trusted.
	Tar    io.Reader
	Kernel string // name of a kernel that was added; "" means Debian's
	// Log receives what the programs of the build print, line by line; it may be nil.
	Log io.Writer
}

const (
	maxPackages = 500
	// minFreeBytes is what must be free on the host before a build starts.
	minFreeBytes = 1 << 30
)

// packageName is Debian's rule. A name ending in '-' asks apt to remove a package.
var packageName = regexp.MustCompile(`^[a-z0-9][a-z0-9+.-]{0,126}[a-z0-9+.]$`)

// check returns spec with its defaults and its packages sorted.
func (spec BuildSpec) check() (BuildSpec, error) {
	if err := ident.CheckTag(spec.Name); err != nil {
		return spec, fmt.Errorf("image name: %w", err)
	}
	if spec.DiskMiB == 0 {
		spec.DiskMiB = defaultDiskMiB
	}
	if spec.DiskMiB < minDiskMiB || spec.DiskMiB > maxDiskMiB {
		return spec, errdefs.New(errdefs.ErrInvalid, "disk of %d MiB: it must have %d to %d MiB", spec.DiskMiB, minDiskMiB, maxDiskMiB)
	}
	if spec.Tar != nil && len(spec.Packages) > 0 {
		return spec, errdefs.New(errdefs.ErrInvalid, "packages are not installed into an archive")
	}
	if len(spec.Packages) > maxPackages {
		return spec, errdefs.New(errdefs.ErrInvalid, "%d packages, more than %d", len(spec.Packages), maxPackages)
	}
	for _, p := range spec.Packages {
		if !packageName.MatchString(p) {
			return spec, errdefs.WithHint(errdefs.New(errdefs.ErrInvalid, "package %.80q is not a Debian package name", p),
				"names have lower-case letters, digits, '+', '-' and '.', and no version")
		}
	}
	spec.Packages = slices.Clone(spec.Packages)
	slices.Sort(spec.Packages)
	spec.Packages = slices.Compact(spec.Packages)
	return spec, nil
}

// Build makes an image and gives it its name. Builds run one after another. When
// it fails or ctx ends, nothing is left. progress may be nil.
func (s *Store) Build(ctx context.Context, spec BuildSpec, progress Progress) (Image, error) {
	if spec.Tar != nil {
		return s.make(ctx, spec, progress, planTar)
	}
	return s.make(ctx, spec, progress, func(spec BuildSpec) (source, Image, error) {
		src, err := s.debian(spec.Packages)
		src.log = spec.Log
		return src, Image{
			ID: ident.New(ident.Image), Name: spec.Name, Suite: debianSuite,
			Packages: spec.Packages, DiskMiB: spec.DiskMiB, Builtin: spec.Builtin,
		}, err
	})
}

// make builds an image of the source that plan returns once it is its turn.
func (s *Store) make(ctx context.Context, spec BuildSpec, progress Progress, plan func(BuildSpec) (source, Image, error)) (Image, error) {
	if progress == nil {
		progress = func(string, float64) {}
	}
	spec, err := spec.check()
	if err != nil {
		return Image{}, fmt.Errorf("build image: %w", err)
	}
	fail := func(err error) (Image, error) {
		return Image{}, fmt.Errorf("build image %s: %w", spec.Name, err)
	}
	if err := s.reserve(spec); err != nil {
		return fail(err)
	}
	defer s.unreserve(spec.Name)
	progress("waiting for earlier builds", 0)
	if err := s.building.acquire(ctx); err != nil {
		return fail(err)
	}
	defer s.building.release()
	src, img, err := plan(spec)
	if err != nil {
		return fail(err)
	}
	k, err := s.kernelFor(ctx, spec.Kernel, span(progress, 0, 0.15))
	if err != nil {
		return fail(err)
	}
	img.KernelDigest, img.KernelRelease = k.Digest, k.Release
	img, err = s.buildFrom(ctx, src, img, span(progress, 0.15, 1))
	if err != nil {
		return fail(err)
	}
	progress("image is ready", 1)
	return img, nil
}

// debian returns the source of Debian packages, if this host can build from it.
func (s *Store) debian(packages []string) (debian, error) {
	cache, err := s.aptCache()
	if err != nil {
		return debian{}, err
	}
	src := debian{packages: packages, aptCache: cache, etcApt: os.DirFS("/etc/apt"), keyring: debianKeyring}
	if _, err := findTool("mke2fs"); err != nil {
		return debian{}, err
	}
	return src, src.check()
}

// buildFrom makes img's files from src and publishes them under its name. The
// caller has the build slot.
func (s *Store) buildFrom(ctx context.Context, src source, img Image, progress Progress) (Image, error) {
	if err := checkFree(s.cfg.Dir); err != nil {
		return Image{}, err
	}
	tmp := filepath.Join(s.cfg.Dir, tempPrefix+img.ID)
	// Only root may look at a tree with set-uid programs and a build in progress.
	if err := os.Mkdir(tmp, 0o700); err != nil {
		return Image{}, classify(err)
	}
	defer func() { _ = removeTree(context.WithoutCancel(ctx), tmp) }() // nothing is there any more once it is published
	whole := filepath.Join(tmp, "image")
	if err := os.Mkdir(whole, 0o755); err != nil {
		return Image{}, classify(err)
	}
	disk := filepath.Join(whole, diskFile)
	if err := s.buildDisk(ctx, src, filepath.Join(tmp, "tree"), disk, img.DiskMiB, progress); err != nil {
		return Image{}, err
	}
	img.Source = src.describe()
	progress("taking the checksum", 0.95)
	var err error
	if img.Digest, err = DigestDisk(ctx, disk); err != nil {
		return Image{}, err
	}
	if img.Bytes, err = physicalBytes(disk); err != nil {
		return Image{}, err
	}
	img.CreatedAt = s.cfg.Now().UTC()
	if err := s.publishImage(img, whole); err != nil {
		return Image{}, err
	}
	return img, nil
}

// buildDisk fills tree from src, turns it into the disk and removes it.
func (s *Store) buildDisk(ctx context.Context, src source, tree, disk string, mib int, progress Progress) error {
	// It becomes the guest's root directory: our umask has no say.
	if err := errors.Join(os.Mkdir(tree, 0o755), os.Chmod(tree, 0o755)); err != nil {
		return classify(err)
	}
	if err := src.fill(ctx, tree, span(progress, 0, 0.85)); err != nil {
		return err
	}
	if err := src.clean(tree); err != nil {
		return err
	}
	progress("writing the disk", 0.85)
	if err := makeDisk(ctx, tree, disk, mib); err != nil {
		return fmt.Errorf("write disk: %w", err)
	}
	if err := os.Chmod(disk, 0o444); err != nil {
		return fmt.Errorf("write disk: %w", err)
	}
	if err := syncPath(disk); err != nil {
		return err
	}
	if err := removeTree(ctx, tree); err != nil {
		return fmt.Errorf("remove build tree: %w", err)
	}
	return nil
}

// publishImage makes the finished directory at whole image img. From the rename
// on it exists; the mark sees to its name if we die before it has it.
func (s *Store) publishImage(img Image, whole string) error {
	data, err := encodeImage(img)
	if err != nil {
		return err
	}
	if err := writeFile(filepath.Join(whole, manifestFile), data, 0o444); err != nil {
		return err
	}
	if err := writeFile(filepath.Join(whole, unnamedFile), nil, 0o444); err != nil {
		return err
	}
	if err := syncPath(whole); err != nil {
		return err
	}
	final := s.imageDir(img.ID)
	if err := publish(whole, final); err != nil {
		return errors.Join(err, s.discard(img.ID))
	}
	if err := s.giveName(img); err != nil {
		return errors.Join(err, s.discard(img.ID))
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.images[img.ID] = img
	return nil
}

func checkFree(dir string) error {
	space, err := linux.ReadDisk(dir)
	if err != nil {
		return fmt.Errorf("measure free space: %w", err)
	}
	if space.AvailableBytes < minFreeBytes {
		return diskIsFull(errdefs.New(errdefs.ErrResourceExhausted, "%d MiB are free for images, a build needs %d", space.AvailableBytes>>20, minFreeBytes>>20))
	}
	return nil
}

// span is progress of a part that takes the shares from to to of the whole.
func span(progress Progress, from, to float64) Progress {
	return func(step string, fraction float64) {
		progress(strings.TrimSpace(step), from+fraction*(to-from))
	}
}
