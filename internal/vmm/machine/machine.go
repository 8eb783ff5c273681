package machine

import (
	"errors"
	"os"
	"sync"

	"forkd.dev/forkd/internal/errdefs"
	"forkd.dev/forkd/internal/vmm/arch"
	"forkd.dev/forkd/internal/vmm/bus"
	"forkd.dev/forkd/internal/vmm/kvm"
	"forkd.dev/forkd/internal/vmm/memory"
)

// Limits of a machine.
const (
	MaxCPUs = 8
	maxMMIO = 16
)

// Config says what a blank machine is made of.
type Config struct {
	System      *kvm.System // stays the caller's
	CPUs        int
	MemoryBytes uint64
	MMIO        int // windows for virtio devices, with doorbell and interrupt line each
	Features    arch.Features
	Huge        bool
	// Pagemap is that of memory.Config, owned by New; nil: opened by it.
	Pagemap *os.File
	// OnThread, if set, is called on the thread of each vCPU before it enters the guest
	// for the first time; its error ends the machine.
	OnThread func() error
}

// Machine is one virtual machine.
type Machine struct {
	cfg     Config
	vm      *kvm.VM
	mem     *memory.Space
	vcpus   []*vcpu
	cpuid   []kvm.CPUIDEntry
	msrs    []uint32
	xsave   int
	ports   bus.Bus
	mmio    bus.Bus
	lines   []line
	serial  *line // of COM1
	devices []attached
	running bool
	filled  bool // has content

	capture *capture // between CaptureBegin and CaptureEnd
	// sinceParent holds pages that were reported as written, and protected again, since
	// the snapshot that is the parent of the next capture.
	sinceParent []memory.Run

	endOnce sync.Once
	ended   chan struct{}
	endedAt gate // posted together with ended
	end     End
	threads sync.WaitGroup
	helpers sync.WaitGroup // goroutines of devices
}

// End is why a machine ended.
type End struct {
	Reason string
	Guest  bool // by the guest's own wish: power-off or reset
}

// New makes a blank machine.
func New(cfg Config) (_ *Machine, err error) {
	if cfg.CPUs < 1 || cfg.CPUs > MaxCPUs || cfg.MMIO < 0 || cfg.MMIO > maxMMIO {
		return nil, errdefs.New(errdefs.ErrInvalid, "make machine of %d CPUs and %d devices", cfg.CPUs, cfg.MMIO)
	}
	m := &Machine{cfg: cfg, ended: make(chan struct{})}
	if m.endedAt, err = newGate(); err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			m.Close()
		}
	}()
	// The VM comes before the memory's mappings, and the memory before the interrupt
	// controllers: see package kvm.
	if m.vm, err = cfg.System.CreateVM(); err != nil {
		return nil, err
	}
	if m.mem, err = memory.New(memory.Config{Bytes: cfg.MemoryBytes, Huge: cfg.Huge, Pagemap: cfg.Pagemap}); err != nil {
		return nil, err
	}
	for i, slot := range m.mem.Slots() {
		if err := m.vm.SetMemory(uint32(i), uint64(slot.Address), slot.Memory); err != nil {
			return nil, err
		}
	}
	if err := m.vm.CreateIRQChip(arch.IRQChipPages); err != nil {
		return nil, err
	}
	if err := errors.Join(m.addLines(), m.addSerialLine(), m.ports.Add(arch.ResetPort, arch.PowerPorts, power{m})); err != nil {
		return nil, err
	}
	return m, m.addVCPUs()
}

func (m *Machine) addVCPUs() error {
	supported, err := m.cfg.System.SupportedCPUID()
	if err != nil {
		return err
	}
	deadline, err := m.cfg.System.Extension(kvm.CapTSCDeadline)
	if err != nil {
		return err
	}
	if m.msrs, err = m.cfg.System.MSRIndices(); err != nil {
		return err
	}
	if m.xsave, err = m.cfg.System.XsaveLen(); err != nil {
		return err
	}
	m.cpuid = arch.Template(supported, m.cfg.CPUs, m.cfg.Features, deadline)
	for i := range m.cfg.CPUs {
		c, err := m.vm.CreateVCPU(i)
		if err != nil {
			return err
		}
		v := &vcpu{kvm: c, id: i}
		m.vcpus = append(m.vcpus, v)
		if err := v.prepare(arch.ForCPU(m.cpuid, i)); err != nil {
			return err
		}
		m.threads.Go(func() { m.loop(v) })
		v.parked.wait()
		v.live = true
	}
	return nil
}

func (v *vcpu) prepare(cpuid []kvm.CPUIDEntry) (err error) {
	if v.wake, err = newGate(); err != nil {
		return err
	}
	if v.parked, err = newGate(); err != nil {
		return err
	}
	return v.kvm.SetCPUID(cpuid)
}

// Close ends the machine and frees all it has. It may be called in any state.
func (m *Machine) Close() {
	m.endWith(End{Reason: "closed"})
	m.CaptureAbort()
	for _, v := range m.vcpus {
		v.stop.Store(true)
		v.quit.Store(true)
		if v.live {
			v.kick()
			v.wake.post()
		}
	}
	m.threads.Wait()
	for _, l := range m.lines {
		l.close()
	}
	if m.serial != nil {
		m.serial.close()
		m.serial = nil
	}
	m.helpers.Wait()
	for _, d := range m.devices {
		if d.release != nil {
			d.release()
		}
	}
	for _, v := range m.vcpus {
		v.kvm.Close()
		v.wake.close()
		v.parked.close()
	}
	if m.vm != nil {
		m.vm.Close()
	}
	if m.mem != nil {
		m.mem.Close()
	}
	m.endedAt.close()
	m.endedAt.fd = -1
	m.vcpus, m.lines, m.devices, m.vm, m.mem = nil, nil, nil, nil, nil
}

// Stop ends the machine for a reason of the host's. Safe for concurrent use.
func (m *Machine) Stop(reason string) { m.endWith(End{Reason: reason}) }

// Waiting says what the guest waits for, or "". Safe for concurrent use.
func (m *Machine) Waiting() string {
	for _, d := range m.devices {
		if w, ok := d.Device.(interface{ Waiting() string }); ok && w.Waiting() != "" {
			return w.Waiting()
		}
	}
	return ""
}

// Ended is closed when the guest or its machine came to an end; End tells why then.
func (m *Machine) Ended() <-chan struct{} { return m.ended }

// EndedFD returns a descriptor that becomes readable when Ended is closed, for poll. It
// stays the machine's.
func (m *Machine) EndedFD() int { return m.endedAt.fd }

// End returns why the machine ended. Only after Ended.
func (m *Machine) End() End { return m.end }

// endWith records the first reason. It may be called from any goroutine.
func (m *Machine) endWith(e End) {
	m.endOnce.Do(func() {
		m.end = e
		close(m.ended)
		m.endedAt.post()
	})
}

func (m *Machine) hasEnded() bool {
	select {
	case <-m.ended:
		return true
	default:
		return false
	}
}

// Shape returns vCPUs and bytes of memory.
func (m *Machine) Shape() (cpus int, memoryBytes uint64) { return m.cfg.CPUs, m.cfg.MemoryBytes }

// Running tells whether the vCPUs run.
func (m *Machine) Running() bool { return m.running }

// Exits counts how often vCPUs left the guest for this process. Safe for concurrent use.
func (m *Machine) Exits() (n uint64) {
	for _, v := range m.vcpus {
		n += v.exits.Load()
	}
	return n
}

// Memory is the guest's memory.
func (m *Machine) Memory() *memory.Space { return m.mem }

// Resume lets the vCPUs run. It may be repeated. ErrGuest: the machine has ended.
func (m *Machine) Resume() error {
	switch {
	case m.hasEnded():
		return errdefs.New(errdefs.ErrGuest, "resume: the machine has ended: %s", m.end.Reason)
	case !m.filled:
		return errdefs.New(errdefs.ErrNotReady, "resume: the machine is blank")
	case m.running:
		return nil
	}
	m.running = true
	for _, d := range m.devices {
		d.Resume()
	}
	for _, v := range m.vcpus {
		v.start()
	}
	return nil
}

// Pause stops vCPUs and devices, and returns when all stand still. It may be repeated.
func (m *Machine) Pause() {
	if !m.running {
		return
	}
	for _, v := range m.vcpus {
		v.stop.Store(true)
		v.kick()
	}
	for _, v := range m.vcpus {
		v.parked.wait()
	}
	for _, d := range m.devices {
		d.Pause()
	}
	m.running = false
}

// line is a doorbell and an interrupt of one virtio window.
type line struct {
	doorbell  *os.File
	interrupt int
}
