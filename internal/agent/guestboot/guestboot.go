// Package guestboot is the first seconds of a guest: it runs as PID 1 out of the
// initramfs, loads modules, mounts the root disk, moves into it and readies the
// machine for the agent.
//
// Everything here runs once, on one goroutine, before any other process exists.
// An error is printed on the console and in the kernel log by the caller, who
// then powers off: a guest that cannot boot should end, not hang.
package guestboot

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
)

// Needed tells whether this process is PID 1 of an initramfs of ours.
func Needed() bool {
	if os.Getpid() != 1 {
		return false
	}
	_, err := os.Stat("/modules")
	return err == nil
}

// Machine is a booted guest.
type Machine struct {
	CgroupDir string
	Port      *os.File // the agent channel
	Warnings  []string // what failed without being needed
}

// Boot readies the machine.
func Boot() (*Machine, error) {
	m := &Machine{}
	if err := mountKernel(); err != nil {
		return nil, err
	}
	if err := loadModules("/modules"); err != nil {
		return nil, err
	}
	params, err := os.ReadFile("/proc/cmdline")
	if err != nil {
		return nil, fmt.Errorf("read kernel command line: %w", err)
	}
	root := Param(string(params), "forkd.root", "/dev/vda")
	if err := mountRoot(root); err != nil {
		return nil, err
	}
	if err := switchRoot(); err != nil {
		return nil, err
	}
	m.warn(mountRest(m))
	m.warn(growRoot(root))
	m.warn(loopbackUp())
	m.warn(unix.Reboot(unix.LINUX_REBOOT_CMD_CAD_OFF)) // ctrl-alt-del becomes SIGINT to us
	if m.Port, err = openPort("org.forkd.agent"); err != nil {
		return nil, err
	}
	return m, nil
}

func (m *Machine) warn(err error) {
	if err != nil {
		m.Warnings = append(m.Warnings, err.Error())
	}
}

// rootOptions keep ext4's background thread from reading bitmaps that a fork may
// never need.
const rootOptions = "noinit_itable,no_prefetch_block_bitmaps"

// quietKernel stops the kernel's periodic housekeeping: in an idle fork it would
// be the only thing that runs, and that wakes the host's CPU. A kernel without
// one of the settings has nothing to stop.
func quietKernel() {
	for name, value := range map[string]string{
		"/proc/sys/vm/compaction_proactiveness":  "0",   // else kcompactd wakes twice a second
		"/proc/sys/vm/stat_interval":             "120", // seconds
		"/proc/sys/vm/dirty_writeback_centisecs": "0",   // much that is dirty is written all the same
		"/proc/sys/kernel/sched_rt_runtime_us":   "-1",  // the agent is real-time and waits in poll
		// The host does what these would do for a disk; they are timers and bookkeeping.
		"/sys/block/vda/queue/wbt_lat_usec": "0",
		"/sys/block/vda/queue/scheduler":    "none",
		"/sys/block/vda/queue/iostats":      "0",
		"/sys/block/vda/queue/add_random":   "0",
	} {
		os.WriteFile(name, []byte(value), 0)
	}
}

// Param returns the value of key on a kernel command line, or fallback.
func Param(line, key, fallback string) string {
	for f := range strings.FieldsSeq(line) {
		if v, ok := strings.CutPrefix(f, key+"="); ok && v != "" {
			return v
		}
	}
	return fallback
}

type mount struct {
	source, target, kind string
	flags                uintptr
	data                 string
}

func (t mount) do() error {
	if err := os.MkdirAll(t.target, 0o755); err != nil {
		return fmt.Errorf("mount %s: %w", t.target, err)
	}
	if err := unix.Mount(t.source, t.target, t.kind, t.flags, t.data); err != nil && err != unix.EBUSY {
		return fmt.Errorf("mount %s: %w", t.target, err)
	}
	return nil
}

const safeFlags = unix.MS_NOSUID | unix.MS_NODEV | unix.MS_NOEXEC

func mountKernel() error {
	for _, t := range []mount{
		{source: "devtmpfs", target: "/dev", kind: "devtmpfs", flags: unix.MS_NOSUID, data: "mode=755"},
		{source: "proc", target: "/proc", kind: "proc", flags: safeFlags},
		{source: "sysfs", target: "/sys", kind: "sysfs", flags: safeFlags},
	} {
		if err := t.do(); err != nil {
			return err
		}
	}
	return nil
}

// loadModules loads every module of dir in the order of the file names.
func loadModules(dir string) error {
	files, err := filepath.Glob(filepath.Join(dir, "*.ko*"))
	if err != nil {
		return err
	}
	slices.Sort(files)
	for _, file := range files {
		if err := loadModule(file); err != nil {
			return fmt.Errorf("load module %s: %w", filepath.Base(file), err)
		}
	}
	return nil
}

// moduleCompressed is MODULE_INIT_COMPRESSED_FILE of linux/module.h.
const moduleCompressed = 4

func loadModule(file string) error {
	f, err := os.Open(file)
	if err != nil {
		return err
	}
	defer f.Close()
	flags := 0
	if !strings.HasSuffix(file, ".ko") {
		flags = moduleCompressed
	}
	if err := unix.FinitModule(int(f.Fd()), "", flags); err != nil && err != unix.EEXIST {
		return err
	}
	return nil
}

const newRoot = "/newroot"

func mountRoot(dev string) error {
	if err := os.MkdirAll(newRoot, 0o755); err != nil {
		return err
	}
	if err := unix.Mount(dev, newRoot, "ext4", unix.MS_NOATIME, rootOptions); err != nil {
		return fmt.Errorf("mount root %s: %w (block devices here: %s)", dev, err, blockDevices())
	}
	return nil
}

func blockDevices() string {
	entries, _ := os.ReadDir("/sys/class/block")
	var names []string
	for _, e := range entries {
		names = append(names, e.Name())
	}
	if len(names) == 0 {
		return "none"
	}
	return strings.Join(names, " ")
}

// switchRoot moves into the mounted root and frees the memory of the initramfs.
func switchRoot() error {
	for _, dir := range []string{"/dev", "/proc", "/sys"} {
		target := newRoot + dir
		if err := os.MkdirAll(target, 0o755); err != nil {
			return fmt.Errorf("switch root: %w", err)
		}
		if err := unix.Mount(dir, target, "", unix.MS_MOVE, ""); err != nil {
			return fmt.Errorf("switch root: move %s: %w", dir, err)
		}
	}
	if err := empty("/"); err != nil {
		return fmt.Errorf("free initramfs: %w", err)
	}
	if err := os.Chdir(newRoot); err != nil {
		return fmt.Errorf("switch root: %w", err)
	}
	if err := unix.Mount(".", "/", "", unix.MS_MOVE, ""); err != nil {
		return fmt.Errorf("switch root: %w", err)
	}
	if err := unix.Chroot("."); err != nil {
		return fmt.Errorf("switch root: %w", err)
	}
	return os.Chdir("/")
}

// empty deletes everything on the file system of dir, which must be a ramfs or
// tmpfs: nothing else is ever emptied. Mounts on it stay.
func empty(dir string) error {
	var fs unix.Statfs_t
	if err := unix.Statfs(dir, &fs); err != nil {
		return err
	}
	if fs.Type != unix.RAMFS_MAGIC && fs.Type != unix.TMPFS_MAGIC {
		return fmt.Errorf("%s is of type %#x, no initramfs", dir, fs.Type)
	}
	var st unix.Stat_t
	if err := unix.Lstat(dir, &st); err != nil {
		return err
	}
	emptyBelow(dir, st.Dev)
	return nil
}

func emptyBelow(dir string, dev uint64) {
	entries, _ := os.ReadDir(dir)
	for _, e := range entries {
		path := filepath.Join(dir, e.Name())
		var st unix.Stat_t
		if unix.Lstat(path, &st) != nil || st.Dev != dev {
			continue
		}
		if e.IsDir() {
			emptyBelow(path, dev)
			unix.Rmdir(path)
			continue
		}
		unix.Unlink(path)
	}
}

// mountRest mounts what programs expect beside the root disk. What fails is
// reported and missing, since many programs do without it.
func mountRest(m *Machine) error {
	var all []error
	for _, t := range []mount{
		{source: "tmpfs", target: "/run", kind: "tmpfs", flags: unix.MS_NOSUID | unix.MS_NODEV, data: "mode=755,size=20%"},
		{source: "devpts", target: "/dev/pts", kind: "devpts", flags: unix.MS_NOSUID | unix.MS_NOEXEC, data: "mode=620,gid=5,ptmxmode=666"},
		{source: "tmpfs", target: "/dev/shm", kind: "tmpfs", flags: unix.MS_NOSUID | unix.MS_NODEV, data: "mode=1777"},
		{source: "cgroup2", target: "/sys/fs/cgroup", kind: "cgroup2", flags: safeFlags},
	} {
		err := t.do()
		all = append(all, err)
		if err == nil && t.kind == "cgroup2" {
			m.CgroupDir = t.target
		}
	}
	quietKernel()
	os.MkdirAll("/run/lock", 0o755)
	os.MkdirAll("/tmp", 0o777)
	os.Chmod("/tmp", 0o777|os.ModeSticky)
	for name, target := range map[string]string{"fd": "/proc/self/fd", "stdin": "fd/0", "stdout": "fd/1", "stderr": "fd/2"} {
		os.Symlink(target, "/dev/"+name)
	}
	return errors.Join(all...)
}
