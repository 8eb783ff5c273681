package image

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"

	"forkd.dev/forkd/internal/errdefs"
	"forkd.dev/forkd/internal/ident"
	"forkd.dev/forkd/internal/image/rootfs"
)

// maxTarEntries bounds the files of a root file system that is given as an archive.
const maxTarEntries = 4_000_000

// tarball is a root file system in an archive.
type tarball struct {
	r      io.Reader
	limit  int64 // of its content
	digest string
}

func (t *tarball) describe() string { return "tar:" + t.digest }

func (t *tarball) check() error {
	if os.Geteuid() != 0 {
		return errdefs.WithHint(errdefs.New(errdefs.ErrUnsupported, "unpack a root file system as an ordinary user"),
			"run forkd serve as root to build images from archives")
	}
	_, err := findTool("mke2fs")
	return err
}

func (t *tarball) fill(ctx context.Context, dir string, progress Progress) error {
	last := int64(-1)
	res, err := rootfs.Extract(ctx, t.r, dir, rootfs.Limits{Bytes: t.limit, Entries: maxTarEntries}, func(bytes int64) {
		if mib := bytes >> 20; mib != last {
			last = mib
			progress(fmt.Sprintf("unpacking the root file system (%d MiB)", mib/64*64), float64(bytes)/float64(t.limit))
		}
	})
	if err != nil {
		return classify(err)
	}
	t.digest = res.Digest
	return nil
}

// clean sets what every guest needs; all else is as in the archive.
func (t *tarball) clean(dir string) error {
	root, err := os.OpenRoot(dir)
	if err != nil {
		return fmt.Errorf("settle root file system: %w", err)
	}
	defer root.Close()
	for _, dir := range []string{"dev", "proc", "sys", "run", "tmp", "etc", "root"} {
		if err := root.Mkdir(dir, 0o755); err != nil && !errors.Is(err, fs.ErrExist) {
			return classify(fmt.Errorf("settle root file system: %w", err))
		}
	}
	for name, text := range map[string]string{"etc/hostname": guestHostname + "\n", "etc/hosts": guestHosts(), "etc/resolv.conf": "", "etc/machine-id": ""} {
		if err := ignoreMissing(root.Remove(name)); err != nil {
			return classify(fmt.Errorf("settle %s: %w", path.Base(name), err))
		}
		if err := root.WriteFile(name, []byte(text), 0o644); err != nil {
			return classify(fmt.Errorf("settle %s: %w", path.Base(name), err))
		}
	}
	return nil
}

// planTar is the plan of an image of spec's archive.
func planTar(spec BuildSpec) (source, Image, error) {
	src := &tarball{r: spec.Tar, limit: int64(spec.DiskMiB) << 20}
	return src, Image{ID: ident.New(ident.Image), Name: spec.Name, DiskMiB: spec.DiskMiB}, src.check()
}
