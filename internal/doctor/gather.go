package doctor

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"time"

	"forkd.dev/forkd/internal/errdefs"
	"forkd.dev/forkd/internal/image"
	"forkd.dev/forkd/internal/linux"
	"forkd.dev/forkd/internal/linux/cgroup"
)

// Facts is what Gather found out. An error beside a fact says why it is missing.
type Facts struct {
	OS, Arch     string // as Go names them
	Distribution string // PRETTY_NAME of os-release, or ""
	UID          int

	CPU        linux.CPU
	CPUErr     error
	Cores      int
	ImageErr   error // why this user cannot build images
	KVM        linux.KVMSpeed
	KVMErr     error
	Kernel     string
	KernelErr  error
	Features   linux.Features
	Cgroups    cgroup.Layout
	CgroupsErr error

	Memory    linux.HostMemory
	MemoryErr error
	Disk      linux.Disk
	DiskErr   error
	Shm       linux.Disk
	ShmErr    error

	// Room for more processes and descriptors; -1 means no limit is known.
	FreeTasks int64
	FileLimit int64

	Tools map[string]Tool
}

// Tool is a program that forkd starts.
type Tool struct {
	Path    string // "" if not found
	Version string // first line of what it says
	Err     error
}

// toolVersions says how each tool is asked for its version.
func toolVersions() map[string][]string {
	return map[string][]string{
		"qemu-system-x86_64": {"--version"},
		"mmdebstrap":         {"--version"},
		"mke2fs":             {"-V"},
		"dpkg-deb":           {"--version"},
		"runc":               {"--version"},
	}
}

// Gather looks at the host; dataDir may not exist yet. It takes about 0.3 s, most
// of it the KVM probe.
func Gather(ctx context.Context, dataDir string) Facts {
	f := Facts{
		OS: runtime.GOOS, Arch: runtime.GOARCH, Cores: runtime.NumCPU(),
		Distribution: distribution(), UID: os.Getuid(), Features: linux.ProbeFeatures(),
		FreeTasks: -1, FileLimit: -1, Tools: make(map[string]Tool),
	}
	f.CPU, f.CPUErr = linux.ReadCPU()
	f.KVM, f.KVMErr = linux.KVMProbe(ctx)
	f.ImageErr = image.CheckBuilder(ctx)
	f.Kernel, f.KernelErr = linux.KernelRelease()
	f.Cgroups, f.CgroupsErr = cgroup.Describe()
	f.Memory, f.MemoryErr = linux.ReadHostMemory()
	f.Disk, f.DiskErr = linux.ReadDisk(dataDir)
	f.Shm, f.ShmErr = linux.ReadDisk("/dev/shm")
	if f.ShmErr == nil && f.Shm.Path != "/dev/shm" {
		f.ShmErr = errdefs.New(errdefs.ErrNotFound, "/dev/shm does not exist")
	}
	f.FreeTasks = freeTasks(f)
	if n, err := linux.FileLimit(); err == nil && n < 1<<62 {
		f.FileLimit = int64(n)
	}
	for name, args := range toolVersions() {
		f.Tools[name] = findTool(ctx, name, args)
	}
	return f
}

func distribution() string {
	b, err := os.ReadFile("/etc/os-release")
	if err != nil {
		return ""
	}
	for line := range strings.Lines(string(b)) {
		if v, ok := strings.CutPrefix(strings.TrimSpace(line), "PRETTY_NAME="); ok {
			return strings.Trim(v, `"`)
		}
	}
	return ""
}

// findTool looks in PATH and where Debian keeps the tools of root.
func findTool(ctx context.Context, name string, args []string) Tool {
	path, err := exec.LookPath(name)
	for _, dir := range []string{"/usr/sbin", "/sbin", "/usr/local/sbin"} {
		if err == nil {
			break
		}
		path, err = exec.LookPath(filepath.Join(dir, name))
	}
	if err != nil {
		return Tool{Err: errdefs.New(errdefs.ErrNotFound, "%s is not installed", name)}
	}
	const patience = 10 * time.Second
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	cmd := exec.CommandContext(ctx, path, args...)
	cmd.WaitDelay = time.Second
	out, err := cmd.CombinedOutput() // mke2fs speaks on stderr
	if err != nil {
		return Tool{Path: path, Err: fmt.Errorf("run %s: %w", path, errdefs.As(errdefs.ErrUnavailable, err))}
	}
	first, _, _ := strings.Cut(strings.TrimSpace(string(out)), "\n")
	return Tool{Path: path, Version: first}
}

// freeTasks is how many more processes and threads the tightest limit allows, or -1.
func freeTasks(f Facts) int64 {
	running := runningTasks()
	free := int64(-1)
	note := func(limit, used int64, err error) {
		if err == nil && (free < 0 || limit-used < free) {
			free = max(limit-used, 0)
		}
	}
	for _, path := range []string{"/proc/sys/kernel/pid_max", "/proc/sys/kernel/threads-max"} {
		limit, err := readInt(path)
		note(limit, running, err)
	}
	if n, err := linux.ProcessLimit(); f.UID != 0 && err == nil && n < 1<<62 {
		note(int64(n), 0, nil)
	}
	if h, ok := f.Cgroups.Controller("pids"); ok {
		limit, err1 := readInt(filepath.Join(h.Dir(), "pids.max")) // "max" is an error here, and no limit
		used, err2 := readInt(filepath.Join(h.Dir(), "pids.current"))
		note(limit, used, errors.Join(err1, err2))
	}
	return free
}

func readInt(path string) (int64, error) {
	b, err := os.ReadFile(path)
	if err != nil {
		return 0, err
	}
	return strconv.ParseInt(strings.TrimSpace(string(b)), 10, 64)
}

// runningTasks reads "running/total" of /proc/loadavg; 0 if that is not there.
func runningTasks() int64 {
	b, err := os.ReadFile("/proc/loadavg")
	if err != nil {
		return 0
	}
	for _, field := range strings.Fields(string(b)) {
		if _, total, ok := strings.Cut(field, "/"); ok {
			n, err := strconv.ParseInt(total, 10, 64)
			if err == nil {
				return n
			}
		}
	}
	return 0
}
