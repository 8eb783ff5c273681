package guestboot

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"forkd.dev/forkd/internal/linux"
)

// growRoot grows the mounted root file system to the size of its device.
func growRoot(dev string) error {
	d, err := os.Open(dev)
	if err != nil {
		return fmt.Errorf("grow root: %w", err)
	}
	defer d.Close()
	size, err := linux.BlockDeviceSize(d)
	if err != nil {
		return fmt.Errorf("grow root: %w", err)
	}
	root, err := os.Open("/")
	if err != nil {
		return fmt.Errorf("grow root: %w", err)
	}
	defer root.Close()
	var fs unix.Statfs_t
	if err := unix.Fstatfs(int(root.Fd()), &fs); err != nil || fs.Bsize <= 0 {
		return fmt.Errorf("grow root: %w", err)
	}
	return linux.GrowExt4(root, size/uint64(fs.Bsize))
}

func loopbackUp() error {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("loopback up: %w", err)
	}
	defer unix.Close(fd)
	req, err := unix.NewIfreq("lo")
	if err != nil {
		return fmt.Errorf("loopback up: %w", err)
	}
	req.SetUint16(unix.IFF_UP | unix.IFF_RUNNING)
	if err := unix.IoctlIfreq(fd, unix.SIOCSIFFLAGS, req); err != nil {
		return fmt.Errorf("loopback up: %w", err)
	}
	return nil
}

// portWait bounds the wait for the agent port to appear after its driver loaded.
const portWait = 10 * time.Second

// openPort opens the virtio-console port of that name. The port appears once the
// host has told its name, shortly after the driver is loaded.
func openPort(name string) (*os.File, error) {
	for end := time.Now().Add(portWait); ; {
		if dev := findPort(name); dev != "" {
			f, err := os.OpenFile(dev, os.O_RDWR|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
			if err == nil {
				return f, nil
			}
			if time.Now().After(end) {
				return nil, fmt.Errorf("open agent port: %w", err)
			}
		} else if time.Now().After(end) {
			return nil, fmt.Errorf("open agent port: no virtio-console port is named %s", name)
		}
		// Polled: the name shows in sysfs, which tells inotify of nothing.
		time.Sleep(5 * time.Millisecond)
	}
}

func findPort(name string) string {
	files, _ := filepath.Glob("/sys/class/virtio-ports/*/name")
	for _, f := range files {
		if b, err := os.ReadFile(f); err == nil && strings.TrimSpace(string(b)) == name {
			return "/dev/" + filepath.Base(filepath.Dir(f))
		}
	}
	return ""
}

// PowerOff makes the disk consistent and ends the machine. It returns only if
// the kernel refuses.
func PowerOff() error {
	unix.Sync()
	unix.Mount("", "/", "", unix.MS_REMOUNT|unix.MS_RDONLY, "")
	unix.Sync()
	return unix.Reboot(unix.LINUX_REBOOT_CMD_POWER_OFF)
}

// Say prints a line to the kernel log, or to the console if there is none yet.
func Say(line string) {
	for _, dev := range []string{"/dev/kmsg", "/dev/console"} {
		f, err := os.OpenFile(dev, os.O_WRONLY, 0)
		if err != nil {
			continue
		}
		defer f.Close()
		fmt.Fprintf(f, "forkd-agent: %.800s\n", line)
		return
	}
	fmt.Fprintf(os.Stderr, "forkd-agent: %s\n", line)
}
