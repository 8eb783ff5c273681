package image

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"forkd.dev/forkd/internal/errdefs"
	"forkd.dev/forkd/internal/ident"
)

// Part is one file of an image or of its kernel, for a copy elsewhere.
type Part struct {
	Name string // images/<id>/... or kernels/<digest>/...
	Path string
}

// Where the parts of a copy lie in it.
const (
	imagesPart  = "images"
	kernelsPart = "kernels"
)

// Parts lists the files of image id and its kernel.
func (s *Store) Parts(id string) ([]Part, error) {
	img, err := s.Get(id)
	if err != nil {
		return nil, err
	}
	k, err := s.readKernel(img.KernelDigest)
	if err != nil {
		return nil, fmt.Errorf("read image %s: %w", id, err)
	}
	kernel := func(file string) Part {
		return Part{kernelsPart + "/" + k.Digest + "/" + filepath.ToSlash(file), filepath.Join(s.kernelDir(k.Digest), file)}
	}
	out := []Part{kernel(kernelFile)}
	for _, p := range k.parts() {
		out = append(out, kernel(p.File))
	}
	for _, file := range []string{manifestFile, diskFile} {
		out = append(out, Part{imagesPart + "/" + img.ID + "/" + file, filepath.Join(s.imageDir(img.ID), file)})
	}
	return out, nil
}

// Receiver takes the files of one image from elsewhere. It is used by one goroutine
// and ends with Discard, also after Publish.
type Receiver interface {
	// Create makes the file of that name, of size bytes and empty. Nil stands for a
	// file that is here already.
	Create(name string, size int64) (*os.File, error)
	// Publish checks all that came against its digests and makes the image visible, if
	// it is not here yet. new tells whether it was not.
	Publish(ctx context.Context) (img Image, isNew bool, err error)
	Discard() error
}

// receiver has a directory for each kind of part, in the file system of its goal.
type receiver struct {
	s          *Store
	dir        string // of the image
	kernelDir  string
	id, digest string // as the names said
}

// Receive begins to receive an image.
func (s *Store) Receive() (Receiver, error) {
	r := &receiver{s: s}
	var err error
	if r.dir, err = os.MkdirTemp(s.cfg.Dir, tempPrefix); err != nil {
		return nil, classify(fmt.Errorf("receive image: %w", err))
	}
	if r.kernelDir, err = os.MkdirTemp(s.cfg.KernelDir, tempPrefix); err != nil {
		return nil, errors.Join(classify(fmt.Errorf("receive image: %w", err)), r.Discard())
	}
	return r, nil
}

func (r *receiver) Create(name string, size int64) (*os.File, error) {
	path, present, err := r.place(name)
	if err != nil || present {
		return nil, err
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return nil, classify(err)
	}
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return nil, classify(err)
	}
	if err := f.Truncate(size); err != nil {
		return nil, errors.Join(classify(err), f.Close())
	}
	return f, nil
}

// place finds where a part belongs. A pack has one image and one kernel.
func (r *receiver) place(name string) (path string, present bool, err error) {
	bad := func() (string, bool, error) {
		return "", false, errdefs.New(errdefs.ErrCorrupt, "there is no place for a file %.260q", name)
	}
	kind, rest, _ := strings.Cut(name, "/")
	owner, file, _ := strings.Cut(rest, "/")
	switch {
	case kind == imagesPart && ident.KindOf(owner) == ident.Image && (r.id == "" || r.id == owner) && (file == manifestFile || file == diskFile):
		r.id = owner
		return filepath.Join(r.dir, file), r.s.known(owner), nil
	case kind == kernelsPart && isDigest(owner) && (r.digest == "" || r.digest == owner):
		base, in := strings.CutPrefix(file, modulesDir+"/")
		if file != kernelFile && file != vmlinuxFile && (!in || base == "" || strings.ContainsRune(base, '/') || strings.HasPrefix(base, ".")) {
			return bad()
		}
		r.digest = owner
		_, err := r.s.readKernel(owner)
		return filepath.Join(r.kernelDir, file), err == nil, nil
	}
	return bad()
}

func (r *receiver) Discard() error {
	var errs []error
	for _, dir := range []string{r.dir, r.kernelDir} {
		if dir != "" {
			errs = append(errs, os.RemoveAll(dir))
		}
	}
	return errors.Join(errs...)
}

func (r *receiver) Publish(ctx context.Context) (Image, bool, error) {
	if r.id == "" || r.digest == "" {
		return Image{}, false, errdefs.New(errdefs.ErrCorrupt, "receive image: there is no image, or no kernel")
	}
	if err := r.s.building.acquire(ctx); err != nil {
		return Image{}, false, err
	}
	defer r.s.building.release()
	if err := r.publishKernel(ctx); err != nil {
		return Image{}, false, fmt.Errorf("receive kernel %s: %w", r.digest, err)
	}
	if r.s.known(r.id) {
		img, err := r.s.Get(r.id)
		return img, false, err
	}
	img, err := r.publishImage(ctx)
	if err != nil {
		return Image{}, false, fmt.Errorf("receive image %s: %w", r.id, err)
	}
	return img, true, nil
}

// publishKernel checks the kernel and puts it into its place, unless it is there.
func (r *receiver) publishKernel(ctx context.Context) error {
	if _, err := r.s.readKernel(r.digest); err == nil {
		return nil
	}
	if err := r.s.kernelWork.acquire(ctx); err != nil {
		return err
	}
	defer r.s.kernelWork.release()
	var k Kernel
	if err := readSealed(filepath.Join(r.kernelDir, kernelFile), kernelFormat, &k); err != nil {
		return corrupt(err)
	}
	if k.Digest != r.digest || digestParts(k.parts()) != r.digest {
		return errdefs.New(errdefs.ErrCorrupt, "its description is of another")
	}
	listed := map[string]bool{kernelFile: true}
	for _, p := range k.parts() {
		if _, _, err := r.place(kernelsPart + "/" + r.digest + "/" + filepath.ToSlash(p.File)); err != nil {
			return err
		}
		path := filepath.Join(r.kernelDir, p.File)
		sum, err := digestPart(path)
		if err != nil {
			return corrupt(err)
		}
		if sum != p.SHA256 {
			return errdefs.New(errdefs.ErrCorrupt, "file %s has SHA-256 %s, not %s", p.File, sum, p.SHA256)
		}
		listed[p.File] = true
	}
	if err := sealTree(r.kernelDir, listed); err != nil {
		return err
	}
	final := r.s.kernelDir(r.digest)
	if err := os.RemoveAll(final); err != nil { // a damaged one; whole ones are found before
		return classify(err)
	}
	return publish(r.kernelDir, final)
}

// publishImage checks the image, makes it visible, and gives it its name if nobody
// has that.
func (r *receiver) publishImage(ctx context.Context) (Image, error) {
	img, err := readImage(r.dir)
	if err != nil {
		return Image{}, corrupt(err)
	}
	if img.ID != r.id || img.KernelDigest != r.digest {
		return Image{}, errdefs.New(errdefs.ErrCorrupt, "its manifest is of image %s with kernel %s", img.ID, img.KernelDigest)
	}
	disk := filepath.Join(r.dir, diskFile)
	if info, err := os.Lstat(disk); err != nil || info.Size() != int64(img.DiskMiB)<<20 {
		return Image{}, errdefs.New(errdefs.ErrCorrupt, "its disk is missing or has the wrong size")
	}
	digest, err := DigestDisk(ctx, disk)
	if err != nil {
		return Image{}, err
	}
	if digest != img.Digest {
		return Image{}, errdefs.New(errdefs.ErrCorrupt, "its disk has digest %s, not %s", digest, img.Digest)
	}
	if err := sealTree(r.dir, map[string]bool{manifestFile: true, diskFile: true}); err != nil {
		return Image{}, err
	}
	s := r.s
	if err := publish(r.dir, s.imageDir(img.ID)); err != nil {
		return Image{}, err
	}
	s.mu.Lock()
	s.images[img.ID] = img
	_, taken := s.names[img.Name]
	taken = taken || s.reserved[img.Name]
	s.mu.Unlock()
	if !taken {
		if err := s.giveName(img); err != nil {
			return Image{}, err
		}
	}
	return s.Get(img.ID)
}

// sealTree makes the files of a received directory read-only and durable. What is not
// listed is refused.
func sealTree(dir string, listed map[string]bool) error {
	return filepath.WalkDir(dir, func(path string, e os.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if e.IsDir() {
			if err := os.Chmod(path, 0o755); err != nil {
				return classify(err)
			}
			return syncPath(path)
		}
		name, err := filepath.Rel(dir, path)
		if err != nil || !listed[name] {
			return errdefs.New(errdefs.ErrCorrupt, "file %.260q is not listed", name)
		}
		if err := os.Chmod(path, 0o444); err != nil {
			return classify(err)
		}
		return syncPath(path)
	})
}

// corrupt turns a missing file of something received into damage.
func corrupt(err error) error {
	if errors.Is(err, errdefs.ErrNotFound) {
		return errdefs.New(errdefs.ErrCorrupt, "%v", err)
	}
	return err
}
