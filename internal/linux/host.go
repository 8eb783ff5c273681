package linux

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"forkd.dev/forkd/internal/errdefs"
)

// KernelRelease returns the release of the running kernel, e.g. "6.1.0-25-amd64".
func KernelRelease() (string, error) {
	var u unix.Utsname
	if err := unix.Uname(&u); err != nil {
		return "", fmt.Errorf("read kernel release: %w", classify(err))
	}
	return unix.ByteSliceToString(u.Release[:]), nil
}

// Disk is the space of one file system.
type Disk struct {
	Path           string // the existing directory that was asked about
	TotalBytes     int64
	AvailableBytes int64 // to this user
	AvailableFiles int64 // inodes; -1 if the file system does not count them
}

// ReadDisk returns the space at path, or at its closest parent that exists.
func ReadDisk(path string) (Disk, error) {
	path = filepath.Clean(path)
	for {
		var st unix.Statfs_t
		_, err := retryEINTR(func() (int, error) { return 0, unix.Statfs(path, &st) })
		if errors.Is(err, fs.ErrNotExist) && filepath.Dir(path) != path {
			path = filepath.Dir(path)
			continue
		}
		if err != nil {
			return Disk{}, fmt.Errorf("read space at %s: %w", path, classify(err))
		}
		d := Disk{
			Path:           path,
			TotalBytes:     int64(st.Blocks) * st.Frsize,
			AvailableBytes: int64(st.Bavail) * st.Frsize,
			AvailableFiles: int64(st.Ffree),
		}
		if st.Files == 0 {
			d.AvailableFiles = -1
		}
		return d, nil
	}
}

// FileLimit returns how many descriptors this process may have, once it raised
// its soft limit to the hard one (Go programs do at start).
func FileLimit() (uint64, error) { return hardLimit(unix.RLIMIT_NOFILE, "descriptors") }

// ProcessLimit returns how many processes and threads this user may have. It does
// not bind root.
func ProcessLimit() (uint64, error) { return hardLimit(unix.RLIMIT_NPROC, "processes") }

func hardLimit(resource int, what string) (uint64, error) {
	var lim unix.Rlimit
	if err := unix.Getrlimit(resource, &lim); err != nil {
		return 0, fmt.Errorf("read limit of %s: %w", what, classify(err))
	}
	return lim.Max, nil
}

// CPU is what /proc/cpuinfo says of the first processor.
type CPU struct {
	Model string
	Flags map[string]bool
}

// Virtualization returns "vmx" or "svm" if the processor shows that feature, else "".
func (c CPU) Virtualization() string {
	for _, f := range []string{"vmx", "svm"} {
		if c.Flags[f] {
			return f
		}
	}
	return ""
}

// ReadCPU reads /proc/cpuinfo.
func ReadCPU() (CPU, error) {
	b, err := os.ReadFile("/proc/cpuinfo")
	if err != nil {
		return CPU{}, fmt.Errorf("read processor: %w", classify(err))
	}
	return parseCPU(string(b)), nil
}

func parseCPU(text string) CPU {
	c := CPU{Flags: make(map[string]bool)}
	first, _, _ := strings.Cut(text, "\n\n") // an empty line ends each processor
	for line := range strings.Lines(first) {
		name, value, _ := strings.Cut(line, ":")
		switch strings.TrimSpace(name) {
		case "model name":
			c.Model = strings.TrimSpace(value)
		case "flags":
			for _, f := range strings.Fields(value) {
				c.Flags[f] = true
			}
		}
	}
	return c
}

// Features are the kernel features that forkd uses. A nil error means that it
// works for this process; else the error says why not.
type Features struct {
	MemfdSeals  error // required: memory that no child can write
	Pidfd       error // required: processes that are not only a number
	PagemapScan error // optional: finds changed pages faster
	Userfaultfd error // optional: live branch of the kvm engine
}

// ProbeFeatures tries each feature.
func ProbeFeatures() Features {
	return Features{
		MemfdSeals:  probeMemfdSeals(),
		Pidfd:       probePidfd(),
		PagemapScan: probePagemapScan(),
		Userfaultfd: probeUserfaultfd(),
	}
}

func probeMemfdSeals() error {
	f, err := MemFile("forkd-probe", PageSize)
	if err != nil {
		return err
	}
	defer f.Close()
	if err := SealImmutable(f); err != nil {
		return err
	}
	if _, err := f.WriteAt([]byte{1}, 0); err == nil {
		return errdefs.New(errdefs.ErrUnsupported, "a sealed memory file can be written")
	}
	return nil
}

func probePidfd() error {
	self, err := Self()
	if err != nil {
		return err
	}
	h, err := self.Open()
	if err != nil {
		return err
	}
	defer h.Close()
	return h.Signal(0)
}

func probePagemapScan() error {
	const pagemapScan = 0xc0606610 // PAGEMAP_SCAN of linux/fs.h
	f, err := os.Open("/proc/self/pagemap")
	if err != nil {
		return fmt.Errorf("open page map: %w", classify(err))
	}
	defer f.Close()
	// A kernel that knows the request complains about the address, others about the request.
	_, _, errno := unix.Syscall(unix.SYS_IOCTL, f.Fd(), pagemapScan, 0)
	if errno == unix.EFAULT {
		return nil
	}
	return errdefs.New(errdefs.ErrUnsupported, "PAGEMAP_SCAN needs Linux 6.7 (%w)", errno)
}

func probeUserfaultfd() error {
	const userModeOnly = 1 // UFFD_USER_MODE_ONLY: what an ordinary user may ask for
	fd, _, errno := unix.Syscall(unix.SYS_USERFAULTFD, unix.O_CLOEXEC|userModeOnly, 0, 0)
	if errno != 0 {
		return fmt.Errorf("userfaultfd: %w", classify(errno))
	}
	return unix.Close(int(fd))
}
