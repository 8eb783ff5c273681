package image

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"forkd.dev/forkd/internal/errdefs"
)

// kernelMeta is the package that depends on the current cloud kernel.
const kernelMeta = "linux-image-cloud-amd64"

var (
	kernelPackage = regexp.MustCompile(`^linux-image-[0-9][a-z0-9.+-]*$`)
	debFile       = regexp.MustCompile(`^[a-z0-9][A-Za-z0-9.+~%:_-]*\.deb$`)
)

// debPackage is a package apt knows, and where it lies in our cache.
type debPackage struct {
	name, version string
	file          string // as apt names it
	size          int64
	sha256        string
	path          string
}

// downloadKernel puts the host's current cloud kernel package into the cache. The
// host's package lists are updated only if they do not know it or are too old.
func (s *Store) downloadKernel(ctx context.Context, progress Progress) (debPackage, error) {
	progress("looking for the guest kernel", 0)
	deb, err := s.fetchDeb(ctx, progress)
	if err == nil || ctx.Err() != nil || errors.Is(err, errdefs.ErrResourceExhausted) || errors.Is(err, errdefs.ErrUnavailable) {
		return deb, err
	}
	progress("updating package lists", 0.1)
	if _, err := run(ctx, aptCommand("apt-get", "update", "--quiet")); err != nil {
		return debPackage{}, errdefs.WithHint(errdefs.New(errdefs.ErrUnavailable, "update package lists for %s: %w", kernelMeta, err),
			"check the network and /etc/apt, then run: apt-get update")
	}
	deb, err = s.fetchDeb(ctx, progress)
	if err != nil && ctx.Err() == nil {
		err = errdefs.WithHint(errdefs.As(errdefs.ErrUnavailable, err), "check with: apt-get download %s", kernelMeta)
	}
	return deb, err
}

func (s *Store) fetchDeb(ctx context.Context, progress Progress) (debPackage, error) {
	out, err := run(ctx, aptCommand("apt-cache", "depends", kernelMeta))
	if err != nil {
		return debPackage{}, err
	}
	name, err := parseDepends(out)
	if err != nil {
		return debPackage{}, err
	}
	out, err = run(ctx, aptCommand("apt-get", "download", "--print-uris", name))
	if err != nil {
		return debPackage{}, err
	}
	deb, err := parsePrintURIs(out)
	if err != nil {
		return debPackage{}, err
	}
	deb.name = name
	dir := filepath.Join(s.cfg.CacheDir, "kernel")
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return debPackage{}, classify(err)
	}
	deb.path = filepath.Join(dir, deb.file)
	if checkFile(deb) == nil {
		return deb, nil
	}
	progress("downloading "+name, 0.2)
	return deb, s.download(ctx, deb)
}

// download fetches deb into a directory of its own and moves it to its place.
func (s *Store) download(ctx context.Context, deb debPackage) error {
	tmp, err := os.MkdirTemp(s.cfg.CacheDir, tempPrefix)
	if err != nil {
		return classify(err)
	}
	defer os.RemoveAll(tmp)
	c := aptCommand("apt-get", "download", deb.name)
	c.dir = tmp
	if _, err := run(ctx, c); err != nil {
		return explainUnpack(err)
	}
	place := deb.path
	deb.path = filepath.Join(tmp, deb.file)
	if err := checkFile(deb); err != nil {
		return err
	}
	return publish(deb.path, place)
}

// aptCommand is a call of apt that writes where we say: its unprivileged user
// could not.
func aptCommand(name string, args ...string) command {
	return command{name: name, args: append([]string{"--option", "APT::Sandbox::User=root"}, args...)}
}

// parseDepends finds the concrete kernel package in the output of apt-cache depends.
func parseDepends(out []byte) (string, error) {
	for line := range bytes.Lines(out) {
		name, ok := strings.CutPrefix(strings.TrimLeft(string(bytes.TrimSpace(line)), "|"), "Depends: ")
		if ok && kernelPackage.MatchString(name) {
			return name, nil
		}
	}
	return "", errdefs.New(errdefs.ErrNotFound, "apt knows no package behind %s", kernelMeta)
}

// parsePrintURIs reads a line like: 'http://...' name_1.2_amd64.deb 123 SHA256:...
func parsePrintURIs(out []byte) (debPackage, error) {
	for line := range bytes.Lines(out) {
		fields := strings.Fields(string(line))
		if len(fields) != 4 || !debFile.MatchString(fields[1]) {
			continue
		}
		size, err := strconv.ParseInt(fields[2], 10, 64)
		sum, ok := strings.CutPrefix(fields[3], "SHA256:")
		parts := strings.Split(fields[1], "_")
		if err != nil || size <= 0 || !ok || !isDigest(sum) || len(parts) != 3 {
			continue
		}
		return debPackage{file: fields[1], size: size, sha256: sum, version: strings.ReplaceAll(parts[1], "%3a", ":")}, nil
	}
	return debPackage{}, errdefs.New(errdefs.ErrNotFound, "apt names no signed file for the kernel package")
}

// checkFile tells whether the file of deb is there with the right content.
func checkFile(deb debPackage) error {
	f, err := os.Open(deb.path)
	if err != nil {
		return classify(fmt.Errorf("check download: %w", err))
	}
	defer f.Close()
	h := sha256.New()
	n, err := io.Copy(h, io.LimitReader(f, deb.size+1))
	if err != nil {
		return fmt.Errorf("check download: %w", err)
	}
	if n != deb.size || hex.EncodeToString(h.Sum(nil)) != deb.sha256 {
		return errdefs.New(errdefs.ErrCorrupt, "check download: %s does not have the content its archive signed", deb.file)
	}
	return nil
}

// filesByAge lists the regular files of dir, most recently written first.
func filesByAge(dir string) ([]os.FileInfo, error) {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, fmt.Errorf("list cache: %w", err)
	}
	var out []os.FileInfo
	for _, e := range entries {
		if info, err := e.Info(); err == nil && info.Mode().IsRegular() {
			out = append(out, info)
		}
	}
	slices.SortFunc(out, func(a, b os.FileInfo) int { return b.ModTime().Compare(a.ModTime()) })
	return out, nil
}
