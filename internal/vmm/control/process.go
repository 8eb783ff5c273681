package control

import (
	"errors"
	"fmt"

	"golang.org/x/sys/unix"

	"forkd.dev/forkd/internal/vmm/confine"
	"forkd.dev/forkd/internal/vmm/kvm"
	"forkd.dev/forkd/internal/vmm/machine"
	"forkd.dev/forkd/internal/vmmwire"
)

// windows is how many virtio devices a process is prepared for: console, disk, entropy,
// network, balloon, and one to spare.
const windows = 6

// threadsLimit bounds the threads of the process: vCPUs, Go's own, blocked calls.
const threadsLimit = 64

// Run is the program forkd-vmm: it prepares a blank machine, confines itself, and serves its
// control socket until the machine has ended.
func Run(args []string, build string) error {
	p, err := vmmwire.ParseProcess(args)
	if err != nil {
		return err
	}
	system, err := kvm.FromFD(vmmwire.FDKVM)
	if err != nil {
		return fmt.Errorf("use descriptor %d: %w", vmmwire.FDKVM, err)
	}
	m, err := machine.New(machine.Config{
		System: system, CPUs: p.Shape.CPUs, MemoryBytes: uint64(p.Shape.MemoryMiB) << 20, MMIO: windows, OnThread: confine.VCPUThread,
	})
	if err != nil {
		return fmt.Errorf("prepare machine: %w", err)
	}
	defer m.Close()
	system.Close()
	c := confine.Config{UID: p.UID, Files: uint64(p.MaxFiles), FileBytes: uint64(p.MaxFileMiB) << 20}
	if p.UID != 0 {
		c.Root, c.Processes = vmmwire.FDRoot, threadsLimit
	}
	lost, err := confine.Process(c)
	if err != nil {
		return fmt.Errorf("confine the process: %w", err)
	}
	if p.UID != 0 {
		_ = unix.Close(vmmwire.FDRoot)
	}
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
