package image

import (
	"fmt"
	"path/filepath"
	"slices"
	"time"

	"forkd.dev/forkd/internal/errdefs"
	"forkd.dev/forkd/internal/ident"
)

const (
	imageFormat  = 1
	manifestFile = "image.json"
	diskFile     = "disk.ext4"
)

// manifest is the body of image.json.
type manifest struct {
	ID            string    `json:"id"`
	Name          string    `json:"name"` // as built; names.json says whose it is now
	Source        string    `json:"source"`
	Suite         string    `json:"suite"`
	Packages      []string  `json:"packages"`
	DiskMiB       int       `json:"disk_mib"`
	Bytes         int64     `json:"bytes"`
	Digest        string    `json:"digest"`
	KernelDigest  string    `json:"kernel_digest"`
	KernelRelease string    `json:"kernel_release"`
	CreatedAt     time.Time `json:"created_at"`
	Builtin       bool      `json:"builtin,omitempty"`
}

func encodeImage(img Image) ([]byte, error) {
	return seal(imageFormat, manifest(img))
}

func decodeImage(data []byte) (Image, error) {
	var m manifest
	if err := unseal(data, imageFormat, &m); err != nil {
		return Image{}, err
	}
	return checkImage(m)
}

func readImage(dir string) (Image, error) {
	var m manifest
	if err := readSealed(filepath.Join(dir, manifestFile), imageFormat, &m); err != nil {
		return Image{}, err
	}
	return checkImage(m)
}

func checkImage(m manifest) (Image, error) {
	bad := func(format string, args ...any) (Image, error) {
		return Image{}, errdefs.New(errdefs.ErrCorrupt, "image manifest: %s", fmt.Sprintf(format, args...))
	}
	switch {
	case ident.KindOf(m.ID) != ident.Image:
		return bad("id %.80q", m.ID)
	case ident.CheckTag(m.Name) != nil:
		return bad("name %.80q", m.Name)
	case !isDigest(m.KernelDigest):
		return bad("kernel digest %.80q", m.KernelDigest)
	case m.DiskMiB < minDiskMiB || m.DiskMiB > maxDiskMiB:
		return bad("disk of %d MiB", m.DiskMiB)
	}
	return Image(m), nil
}

// isDigest tells whether s is a SHA-256 in hexadecimal, safe as a file name.
func isDigest(s string) bool {
	if len(s) != 64 {
		return false
	}
	return !slices.ContainsFunc([]byte(s), func(c byte) bool {
		return (c < '0' || c > '9') && (c < 'a' || c > 'f')
	})
}
