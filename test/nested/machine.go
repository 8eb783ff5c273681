package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"syscall"
	"time"

	"forkd.dev/forkd/internal/linux"
)

// consoleFile receives what L1's kernel and its init print.
const consoleFile = "console.log"

// machine is L1.
type machine struct {
	opts            options
	initramfs, disk string
}

func newMachine(o options) *machine {
	return &machine{opts: o, initramfs: filepath.Join(o.work, "initramfs.cpio"), disk: filepath.Join(o.work, "disk.raw")}
}

// run boots L1, lets r follow its report and returns when L1 is off.
func (m *machine) run(ctx context.Context, r *reporter) error {
	khz, err := linux.TSCkHz()
	if err != nil {
		return err
	}
	reports, port, err := os.Pipe()
	if err != nil {
		return err
	}
	defer reports.Close()
	vmlinuz, err := one(filepath.Join(m.opts.kernel, "boot/vmlinuz-*"))
	if err != nil {
		return err
	}
	cmd := exec.CommandContext(ctx, "qemu-system-x86_64", m.args(vmlinuz, khz)...)
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGTERM) }
	cmd.WaitDelay = 10 * time.Second
	cmd.Stdout, cmd.Stderr = port, os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	err = cmd.Start()
	_ = port.Close()
	if err != nil {
		return fmt.Errorf("start L1: %w", err)
	}
	followed := r.follow(reports)
	ended := cmd.Wait()
	if ctx.Err() != nil {
		ended = fmt.Errorf("L1 was ended: %w", ctx.Err())
	}
	return errors.Join(followed, ended)
}

// args are QEMU's. L1's own calibration of the TSC fails at random on a busy host,
// and without a rate its KVM starts no guest: it is told the host's, which is what
// an emulated processor counts at. Mitigations cost much in emulation and protect
// nothing here. QEMU 7.2 sometimes leaves garbage in the flags after a cmpxchg16b,
// which ends L1 with a double fault, so there is none.
func (m *machine) args(vmlinuz string, khz uint64) []string {
	cmdline := fmt.Sprintf("console=ttyS0 quiet rdinit=/init panic=-1 mitigations=off nokaslr tsc_early_khz=%d tsc=reliable", khz)
	return []string{
		"-nodefaults", "-no-user-config", "-no-reboot", "-display", "none",
		"-M", "q35", "-accel", "tcg,thread=multi", "-cpu", "max,-cx16", "-smp", strconv.Itoa(m.opts.cpus), "-m", strconv.Itoa(m.opts.memoryMiB),
		"-kernel", vmlinuz, "-initrd", m.initramfs, "-append", cmdline,
		"-serial", "file:" + filepath.Join(m.opts.work, consoleFile),
		"-drive", "if=none,id=disk,format=raw,cache=unsafe,discard=unmap,file=" + m.disk, "-device", "virtio-blk-pci,drive=disk",
		"-device", "virtio-rng-pci",
		"-device", "virtio-serial-pci", "-chardev", "file,id=report,path=/dev/stdout", "-device", "virtserialport,chardev=report,name=report",
	}
}
