package image

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"

	"forkd.dev/forkd/internal/errdefs"
)

const debianSuite = "bookworm"

// source fills a directory with a root file system: Debian packages here, other
// kinds of images later.
type source interface {
	// describe names the source in manifests, e.g. "debian:bookworm", once it is filled in.
	describe() string
	// check tells what the host lacks for fill.
	check() error
	// fill writes the tree into dir, which exists and is empty, with owners, modes
	// and device nodes as they shall be. On an error dir may hold anything.
	fill(ctx context.Context, dir string, progress Progress) error
	// clean removes from the filled tree what is none of a guest's business.
	clean(dir string) error
}

// debian is a minimal Debian with packages, made by mmdebstrap.
type debian struct {
	packages []string
	aptCache string // existing directory of package files, kept for the next build
	etcApt   fs.FS  // the host's apt configuration
	keyring  string // of Debian's archive, on the host
	log      io.Writer
}

func (d debian) clean(dir string) error { return cleanTree(dir) }

func (d debian) describe() string { return "debian:" + debianSuite }

// check fails with what is missing on this host, before any work is done.
func (d debian) check() error {
	if _, err := os.Stat(d.keyring); err != nil {
		return errdefs.WithHint(errdefs.New(errdefs.ErrUnavailable, "verify Debian packages: %w", err),
			"apt-get install debian-archive-keyring")
	}
	if _, err := findTool("mmdebstrap"); err != nil {
		return err
	}
	return CheckBuilder(context.Background())
}

func (d debian) fill(ctx context.Context, dir string, progress Progress) error {
	tmp := dir + "-tmp"
	if err := os.Mkdir(tmp, 0o700); err != nil {
		return classify(err)
	}
	defer os.RemoveAll(tmp)
	_, err := run(ctx, command{
		name: "mmdebstrap", args: d.args(dir), isolate: buildIsolation(),
		env: []string{"TMPDIR=" + tmp, "FORKD_APT_CACHE=" + d.aptCache},
		onLine: func(line string) {
			reportMmdebstrap(line, progress)
			if d.log != nil {
				_, _ = fmt.Fprintln(d.log, line)
			}
		},
	})
	return explainMmdebstrap(err)
}

func (d debian) args(dir string) []string {
	args := []string{
		"--mode=root", "--variant=minbase", "--format=directory",
		// The package files are bind-mounted from our cache and must stay.
		"--skip=essential/unlink,download/empty,cleanup/apt/cache",
		`--setup-hook=mkdir -p "$1/var/cache/apt/archives" && mount --bind "$FORKD_APT_CACHE" "$1/var/cache/apt/archives"`,
		`--customize-hook=umount "$1/var/cache/apt/archives"`,
		// The tree is thrown away if the host stops: syncing it is waste.
		"--dpkgopt=force-unsafe-io",
		"--aptopt=APT::Install-Recommends false",
	}
	for _, rule := range dpkgTrimming() {
		args = append(args, "--dpkgopt="+rule)
	}
	if len(d.packages) > 0 {
		args = append(args, "--include="+strings.Join(d.packages, ","))
	}
	args = append(args, debianSuite, dir)
	return append(args, hostMirrors(d.etcApt).lines(debianSuite, d.keyring)...)
}

// dpkgTrimming keeps manuals and translations out of images. Licences stay.
func dpkgTrimming() []string {
	return []string{
		"path-exclude=/usr/share/doc/*", "path-include=/usr/share/doc/*/copyright",
		"path-exclude=/usr/share/man/*", "path-exclude=/usr/share/info/*", "path-exclude=/usr/share/lintian/*",
		"path-exclude=/usr/share/locale/*", "path-include=/usr/share/locale/locale.alias",
	}
}

// reportMmdebstrap turns what mmdebstrap prints into progress. The fractions are
// the shares of a build of Python with numpy.
func reportMmdebstrap(line string, progress Progress) {
	for _, step := range []struct {
		prefix, text string
		fraction     float64
	}{
		{"I: running apt-get update", "reading package lists", 0},
		{"I: downloading packages", "downloading the base system", 0.12},
		{"I: extracting archives", "unpacking the base system", 0.25},
		{"I: installing essential", "installing the base system", 0.35},
		{"I: installing remaining", "installing packages", 0.55},
		{"I: cleaning", "cleaning up", 0.95},
	} {
		if strings.HasPrefix(line, step.prefix) {
			progress(step.text, step.fraction)
		}
	}
}

var (
	missingPackage = regexp.MustCompile(`(?m)^E: (?:Unable to locate package|Couldn't find any package by (?:glob|regex)) '?([^\s']+)`)
	noCandidate    = regexp.MustCompile(`(?m)^E: Package '([^']+)' has no installation candidate`)
	unmet          = regexp.MustCompile(`(?m)unmet dependencies|held broken packages`)
	diskFull       = regexp.MustCompile(`(?i)no space left on device|disk quota exceeded|don't have enough free space`)
	unreachable    = regexp.MustCompile(`(?m)^(?:E|W|Err).*(?:Failed to fetch|Could not resolve|Could not connect|Unable to connect|Temporary failure)|Unable to connect to`)
)

// explainMmdebstrap finds the class of a failed run in its output, for which
// mmdebstrap and apt have no other form.
func explainMmdebstrap(err error) error {
	if errors.Is(err, syscall.EPERM) {
		return errdefs.WithHint(errdefs.As(errdefs.ErrPermission, err), "building needs the right to make mount and process namespaces (CAP_SYS_ADMIN)")
	}
	tail := tailOf(err)
	for _, form := range []*regexp.Regexp{missingPackage, noCandidate} {
		if m := form.FindStringSubmatch(tail); m != nil {
			return errdefs.WithHint(errdefs.New(errdefs.ErrInvalid, "package %q is not in Debian %s: %w", m[1], debianSuite, err),
				"look for the right name with: apt-cache search %s", m[1])
		}
	}
	switch {
	case diskFull.MatchString(tail):
		return diskIsFull(fmt.Errorf("the host's disk is full: %w", err))
	case unmet.MatchString(tail):
		return errdefs.New(errdefs.ErrInvalid, "the packages cannot be installed together: %w", err)
	case unreachable.MatchString(tail):
		return errdefs.WithHint(errdefs.New(errdefs.ErrUnavailable, "the Debian mirror cannot be reached: %w", err),
			"check the network, http_proxy and the mirrors in /etc/apt")
	}
	return err
}

// aptCache returns the directory of kept package files after dropping the oldest
// ones beyond maxAptCache.
func (s *Store) aptCache() (string, error) {
	dir := filepath.Join(s.cfg.CacheDir, "apt")
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return "", classify(err)
	}
	if err := trimCache(dir, maxAptCache); err != nil {
		return "", err
	}
	return dir, nil
}

const maxAptCache = 2 << 30

// trimCache removes the least recently written files of dir until the rest has at
// most limit bytes.
func trimCache(dir string, limit int64) error {
	files, err := filesByAge(dir)
	if err != nil {
		return err
	}
	var total int64
	for _, f := range files { // newest first
		total += f.Size()
		if total <= limit {
			continue
		}
		if err := os.Remove(filepath.Join(dir, f.Name())); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return classify(err)
		}
	}
	return nil
}
