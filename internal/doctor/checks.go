package doctor

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"forkd.dev/forkd/internal/errdefs"
	"forkd.dev/forkd/internal/linux/cgroup"
)

func pass(name, format string, args ...any) Check {
	return Check{Name: name, Status: Pass, Detail: fmt.Sprintf(format, args...)}
}

// notPass makes a check with a remedy; detail is final text.
func notPass(name string, status Status, detail, remedy string) Check {
	return Check{Name: name, Status: status, Detail: detail, Remedy: remedy}
}

// remedyOf prefers the hint that came with the error.
func remedyOf(err error, otherwise string) string {
	if h := errdefs.Hint(err); h != "" {
		return h
	}
	return otherwise
}

func platform(f Facts) Check {
	const name = "platform"
	switch {
	case f.OS != "linux":
		return notPass(name, Fail, f.OS, "run forkd on Linux")
	case !strings.HasPrefix(f.Distribution, "Debian"):
		d := f.Distribution
		if d == "" {
			d = "unknown distribution"
		}
		return notPass(name, Warn, d+": forkd is tested on Debian 12 only", "use Debian 12, or install by hand what `make setup` would")
	}
	return pass(name, "%s", f.Distribution)
}

func architecture(f Facts) Check {
	const name = "architecture"
	if f.Arch != "amd64" {
		return notPass(name, Fail, f.Arch+": guests are x86-64", "run forkd on an x86-64 machine")
	}
	model := f.CPU.Model
	if model == "" {
		model = "unknown processor"
	}
	return pass(name, "x86-64, %d cores, %s", f.Cores, model)
}

func virtualization(f Facts) Check {
	const name = "cpu-virtualization"
	switch {
	case f.CPUErr != nil:
		return notPass(name, Warn, f.CPUErr.Error(), "mount /proc")
	case f.CPU.Virtualization() != "":
		return pass(name, "the processor shows %s", f.CPU.Virtualization())
	case f.CPU.Flags["hypervisor"]:
		return notPass(name, Warn, "this is a virtual machine whose processor shows neither vmx nor svm",
			"turn on nested virtualization for this machine, or go on with emulation")
	}
	return notPass(name, Warn, "the processor shows neither vmx nor svm", "turn on VT-x or AMD-V in the firmware, or go on with emulation")
}

func kvm(f Facts) Check {
	const name = "kvm"
	switch {
	case f.KVMErr != nil:
		return notPass(name, Warn, f.KVMErr.Error(), remedyOf(f.KVMErr, "load kvm_intel or kvm_amd, or go on with emulation"))
	case !f.KVM.Fast():
		return notPass(name, Warn, f.speed().String()+", so a kernel in it would be slower than in an emulator",
			"use a host whose /dev/kvm has hardware virtualization below it, or go on with emulation")
	}
	return pass(name, "%s", f.speed().String())
}

func kernel(f Facts) Check {
	const name = "kernel"
	if f.KernelErr != nil {
		return notPass(name, Fail, f.KernelErr.Error(), "run forkd on Linux 5.10 or newer")
	}
	if err := errors.Join(f.Features.MemfdSeals, f.Features.Pidfd); err != nil {
		return notPass(name, Fail, fmt.Sprintf("%s lacks what forkd needs: %s", f.Kernel, oneLine(err)), "run Linux 5.10 or newer, outside of containers that filter system calls")
	}
	optional := func(what string, err error) string {
		if err != nil {
			return "no " + what
		}
		return what
	}
	return pass(name, "%s; sealed memory, pidfd; optional: %s, %s", f.Kernel,
		optional("PAGEMAP_SCAN", f.Features.PagemapScan), optional("userfaultfd", f.Features.Userfaultfd))
}

func oneLine(err error) string { return strings.ReplaceAll(err.Error(), "\n", "; ") }

func cgroups(f Facts) Check {
	const name = "cgroups"
	if f.CgroupsErr != nil || f.Cgroups.Mode == cgroup.ModeNone {
		return notPass(name, Warn, "no control groups here: memory and process limits cannot be applied",
			"mount cgroup2 on /sys/fs/cgroup, or run without limits")
	}
	want := []string{"memory", "pids", "cpu"}
	have := f.Cgroups.Writable(want...)
	if len(have) < len(want) {
		return notPass(name, Warn, fmt.Sprintf("%s, usable of %s: %s", f.Cgroups.Mode, strings.Join(want, ", "), listOrNone(have)),
			"run as root, or under systemd with Delegate=yes (systemd-run --user --scope -p Delegate=yes)")
	}
	return pass(name, "%s, usable: %s", f.Cgroups.Mode, strings.Join(have, ", "))
}

func listOrNone(s []string) string {
	if len(s) == 0 {
		return "none"
	}
	return strings.Join(s, ", ")
}

func user(f Facts) Check {
	const name = "user"
	if f.UID == 0 {
		return pass(name, "root: machine processes get a uid each, an empty root and limits")
	}
	return notPass(name, Warn, fmt.Sprintf("uid %d: no uid per sandbox, no empty root for machine processes; limits only in delegated control groups", f.UID),
		"run the daemon as root: its machine processes are unprivileged then")
}

func images(f Facts) Check {
	const name = "image-builds"
	switch {
	case f.ImageErr != nil:
		return notPass(name, Warn, oneLine(f.ImageErr), remedyOf(f.ImageErr, "build images with a daemon of root"))
	case f.UID == 0:
		return pass(name, "as root, in private mount and process namespaces")
	}
	return pass(name, "in a user namespace, with this user's subordinate ids")
}

func sharedMemory(f Facts) Check {
	const name = "shared-memory"
	if f.ShmErr != nil {
		return notPass(name, Warn, f.ShmErr.Error(), "mount -t tmpfs tmpfs /dev/shm")
	}
	return pass(name, "/dev/shm has %s; snapshot memory uses sealed memfds, which it does not limit", bytesText(f.Shm.AvailableBytes))
}

func tools(f Facts) []Check {
	var out []Check
	for _, t := range []struct{ name, need, pkg string }{
		{"qemu-system-x86_64", "the qemu engine", "qemu-system-x86"},
		{"mmdebstrap", "building images", "mmdebstrap"},
		{"mke2fs", "building images", "e2fsprogs"},
		{"dpkg-deb", "building images", "dpkg"},
		{"runc", "", ""},
	} {
		out = append(out, tool(t.name, t.need, t.pkg, f.Tools[t.name]))
	}
	return out
}

// tool judges one program; an empty need means that nothing depends on it.
func tool(program, need, pkg string, t Tool) Check {
	name := "tool-" + program
	switch {
	case t.Path == "" && need == "":
		return notPass(name, Skip, "not installed; only benchmarks compare with it", "apt-get install "+program)
	case t.Path == "":
		return notPass(name, Fail, "not installed; needed for "+need, "make setup, or apt-get install --no-install-recommends "+pkg)
	case t.Err != nil && need == "":
		return notPass(name, Skip, t.Err.Error(), "reinstall it")
	case t.Err != nil:
		return notPass(name, Fail, t.Err.Error(), "apt-get install --reinstall "+pkg)
	}
	return pass(name, "%s (%s)", t.Version, t.Path)
}

func daemon(ctx context.Context, in Input) Check {
	const name = "daemon"
	if in.Daemon == nil {
		return notPass(name, Skip, "not asked", "forkd version tells")
	}
	version, err := in.Daemon(ctx)
	switch {
	case errors.Is(err, errdefs.ErrUnavailable), errors.Is(err, errdefs.ErrNotFound):
		return notPass(name, Skip, "no daemon answers", remedyOf(err, "forkd serve"))
	case err != nil:
		return notPass(name, Warn, err.Error(), remedyOf(err, "look at the daemon's log, or restart it: sandboxes survive that"))
	}
	return pass(name, "answers, version %s", version)
}

func leftovers(ctx context.Context, in Input) Check {
	const name = "leftovers"
	if in.Leftovers == nil {
		return notPass(name, Skip, "not asked", "forkd cleanup lists and removes them")
	}
	left, err := in.Leftovers(ctx)
	switch {
	case err != nil:
		return notPass(name, Warn, err.Error(), remedyOf(err, "run forkd doctor as the user that runs the daemon"))
	case len(left) > 0:
		const shown = 5
		text := strings.Join(left[:min(len(left), shown)], ", ")
		if len(left) > shown {
			text += fmt.Sprintf(" and %d more", len(left)-shown)
		}
		return notPass(name, Warn, fmt.Sprintf("%d of earlier runs: %s", len(left), text), "forkd cleanup")
	}
	return pass(name, "none")
}
