package control

import (
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"

	"forkd.dev/forkd/internal/vmm/confine"
	"forkd.dev/forkd/internal/vmm/kvm"
	"forkd.dev/forkd/internal/vmm/machine"
	"forkd.dev/forkd/internal/vmm/memory"
	"forkd.dev/forkd/internal/vmmwire"
)

// windows is how many virtio devices a process is prepared for: console, disk, entropy,
// network, balloon, and one to spare.
const windows = 6

// threadsLimit bounds the threads of the process: vCPUs, Go's own, blocked calls.
const threadsLimit = 64

// Run is the program forkd-vmm: it gives up its rights, prepares a blank machine, gives up the
// system calls that took, and serves its control socket until the machine has ended.
func Run(args []string, build string) error {
	p, err := vmmwire.ParseProcess(args)
	if err != nil {
		return err
	}
	pagemap, err := memory.OpenPagemap()
	if err != nil {
		return err
	}
	c := confine.Config{UID: p.UID, Files: uint64(p.MaxFiles), FileBytes: uint64(p.MaxFileMiB) << 20}
	if p.UID != 0 {
		c.Root, c.Processes = vmmwire.FDRoot, threadsLimit
	}
	lost, err := confine.Rights(c)
	if err != nil {
		return fmt.Errorf("confine the process: %w", err)
	}
	if p.UID != 0 {
		_ = unix.Close(vmmwire.FDRoot)
	}
	m, err := prepare(p, pagemap)
	if err != nil {
		return fmt.Errorf("prepare machine: %w", err)
	}
	defer m.Close()
	more, err := confine.Filter()
	if err != nil {
		return fmt.Errorf("confine the process: %w", err)
	}
	lost = append(lost, more...)
	server, err := New(Config{Listener: vmmwire.FDControl, Machine: m, Build: build, Lost: lost})
	if err != nil {
		return err
	}
	end, err := server.Run()
	if err != nil {
		return err
	}
	if !end.Guest {
		return errors.New(end.Reason)
	}
	return nil
}

// prepare makes the blank machine.
func prepare(p vmmwire.Process, pagemap *os.File) (*machine.Machine, error) {
	system, err := kvm.FromFD(vmmwire.FDKVM)
	if err != nil {
		return nil, fmt.Errorf("use descriptor %d: %w", vmmwire.FDKVM, err)
	}
	defer system.Close()
	return machine.New(machine.Config{
		System: system, CPUs: p.Shape.CPUs, MemoryBytes: uint64(p.Shape.MemoryMiB) << 20, MMIO: windows,
		OnThread: confine.VCPUThread, Pagemap: pagemap,
	})
}
