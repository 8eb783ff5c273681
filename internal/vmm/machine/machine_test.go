package machine

import (
	"bytes"
	"encoding/binary"
	"errors"
	"os"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"forkd.dev/forkd/internal/errdefs"
	"forkd.dev/forkd/internal/tinyguest"
	"forkd.dev/forkd/internal/vmm/arch"
	"forkd.dev/forkd/internal/vmm/kvm"
	"forkd.dev/forkd/internal/vmm/memory"
	"forkd.dev/forkd/internal/vmmwire"
)

const (
	pageSize = memory.PageSize
	mib      = 1 << 20
	guestMiB = 96
	patience = 20 * time.Second
)

func openKVM(t testing.TB) *kvm.System {
	t.Helper()
	s, err := kvm.Open()
	if errors.Is(err, errdefs.ErrNotFound) || errors.Is(err, errdefs.ErrPermission) {
		t.Skipf("needs a usable /dev/kvm: %v", err)
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.Close)
	return s
}

// uart is a serial port that sends to a channel.
type uart chan byte

func (u uart) Read(offset uint64, p []byte) {
	clear(p)
	if offset == 5 {
		p[0] = 0x60
	}
}

func (u uart) Write(offset uint64, p []byte) {
	if offset != 0 {
		return
	}
	for _, b := range p {
		select {
		case u <- b:
		default:
		}
	}
}
func (uart) Pause()                      {}
func (uart) Resume()                     {}
func (uart) AppendState(b []byte) []byte { return append(b, "uart"...) }
func (uart) LoadState(b []byte) error {
	if string(b) != "uart" {
		return errdefs.New(errdefs.ErrCorrupt, "state of the test's uart is %q", b)
	}
	return nil
}

// expect waits for the guest to print b.
func (u uart) expect(t testing.TB, m *Machine, want byte) {
	t.Helper()
	deadline := time.After(patience)
	for {
		select {
		case got := <-u:
			if got == want {
				return
			}
			if got == '!' {
				t.Fatalf("the guest faulted")
			}
		case <-m.Ended():
			t.Fatalf("the machine ended: %s", m.End().Reason)
		case <-deadline:
			regs, _ := m.vcpus[0].kvm.Regs()
			t.Fatalf("the guest did not print %q (rip %#x)", want, regs.RIP)
		}
	}
}

func blank(t testing.TB, s *kvm.System, cpus int) (*Machine, uart) {
	t.Helper()
	m, err := New(Config{System: s, CPUs: cpus, MemoryBytes: guestMiB * mib, MMIO: 2})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(m.Close)
	u := make(uart, 1024)
	if err := m.AddSerial(u, nil); err != nil {
		t.Fatal(err)
	}
	return m, u
}

// boot starts the tiny guest and waits until it is ready.
func boot(t testing.TB, s *kvm.System, cmdline string) (*Machine, uart) {
	t.Helper()
	m, u := blank(t, s, 1)
	elf := tinyguest.ELF()
	if err := m.Boot(arch.Boot{Kernel: arch.File{ReaderAt: bytes.NewReader(elf), Bytes: int64(len(elf))}, Cmdline: cmdline}); err != nil {
		t.Fatal(err)
	}
	if err := m.Resume(); err != nil {
		t.Fatal(err)
	}
	u.expect(t, m, tinyguest.Ready)
	return m, u
}

func memfd(t testing.TB, bytes int64) int {
	t.Helper()
	fd, err := unix.MemfdCreate("test", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.Close(fd) })
	if err := unix.Ftruncate(fd, bytes); err != nil {
		t.Fatal(err)
	}
	return fd
}

func dup(t testing.TB, fd int) int {
	t.Helper()
	n, err := unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	return n
}

func contents(t testing.TB, fd int) []byte {
	t.Helper()
	b, err := os.ReadFile("/proc/self/fd/" + itoa(fd))
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func itoa(n int) string {
	var b []byte
	for {
		b = append([]byte{byte('0' + n%10)}, b...)
		if n /= 10; n == 0 {
			return string(b)
		}
	}
}

// snap is a captured machine.
type snap struct {
	plan  memory.Plan
	state []byte
	done  vmmwire.Captured
}

// content returns the page of a guest as the snapshot has it.
func (s *snap) content(t testing.TB, page uint64) []byte {
	t.Helper()
	for _, r := range s.plan {
		if r.Source != nil && page >= r.Page && page < r.End() {
			b := make([]byte, pageSize)
			if _, err := unix.Pread(r.Source.FD, b, int64(r.Offset+(page-r.Page)*pageSize)); err != nil {
				t.Fatal(err)
			}
			return b
		}
	}
	return make([]byte, pageSize)
}

// take captures m over base, whose other pages show through.
func take(t testing.TB, m *Machine, base *snap, resume bool) *snap {
	t.Helper()
	pages, index, state := memfd(t, 0), memfd(t, 0), memfd(t, 0)
	if _, err := m.CaptureBegin(Capture{Pages: dup(t, pages), Index: dup(t, index), MaxPages: guestMiB * mib / pageSize}); err != nil {
		t.Fatal(err)
	}
	done, err := m.CaptureEnd(state, resume, func() error { return nil })
	if err != nil {
		t.Fatal(err)
	}
	source, err := memory.NewSource(pages)
	if err != nil {
		t.Fatal(err)
	}
	runs, err := vmmwire.ParseRuns(contents(t, index), guestMiB*mib/pageSize, done.Pages)
	if err != nil {
		t.Fatal(err)
	}
	out := &snap{state: contents(t, state), done: done}
	var below memory.Plan
	if base != nil {
		below = base.plan
	}
	out.plan = over(below, runs, &source)
	if _, err := unix.FcntlInt(uintptr(pages), unix.F_ADD_SEALS, unix.F_SEAL_WRITE|unix.F_SEAL_SHRINK|unix.F_SEAL_GROW); err != nil {
		t.Fatal(err)
	}
	return out
}

// over lays runs over a plan.
func over(below memory.Plan, runs []vmmwire.Run, source *memory.Source) memory.Plan {
	pages := make([]memory.Range, guestMiB*mib/pageSize)
	put := func(r memory.Range) {
		for i := uint64(0); i < r.Count; i++ {
			pages[r.Page+i] = memory.Range{Page: r.Page + i, Count: 1, Source: r.Source, Offset: r.Offset + i*pageSize}
		}
	}
	for _, r := range below {
		put(r)
	}
	for _, r := range runs {
		put(memory.Range{Page: r.Page, Count: r.Count, Source: source, Offset: r.Slot * pageSize})
	}
	var out memory.Plan
	for _, p := range pages {
		if p.Source == nil {
			continue
		}
		if n := len(out); n > 0 && out[n-1].End() == p.Page && out[n-1].Source == p.Source && out[n-1].Offset+out[n-1].Count*pageSize == p.Offset {
			out[n-1].Count++
		} else {
			out = append(out, p)
		}
	}
	return out
}

var generations byte

// restore makes a machine from a snapshot, which runs.
func restore(t testing.TB, s *kvm.System, from *snap) (*Machine, uart) {
	t.Helper()
	m, u := blank(t, s, 1)
	generations++
	if err := m.Restore(from.plan, from.state, [16]byte{generations, 1}); err != nil {
		t.Fatal(err)
	}
	if err := m.Resume(); err != nil {
		t.Fatal(err)
	}
	return m, u
}

func wordAt(t testing.TB, m *Machine, address uint64) uint64 {
	t.Helper()
	var b [8]byte
	if err := m.mem.ReadAt(b[:], memory.Address(address)); err != nil {
		t.Fatal(err)
	}
	return binary.LittleEndian.Uint64(b[:])
}

func TestBootForkFork(t *testing.T) {
	s := openKVM(t)
	parent, _ := boot(t, s, "touch=8 wait=1")
	first := take(t, parent, nil, true)
	if n := first.done.Pages; n < 8*mib/pageSize || n > 8*mib/pageSize+64 {
		t.Errorf("captured %d pages of a guest that wrote %d", n, 8*mib/pageSize)
	}
	for range 5 {
		child, u := restore(t, s, first)
		u.expect(t, child, tinyguest.Resumed)
		second := take(t, child, first, false)
		if n := second.done.Pages; n > 64 {
			t.Errorf("a child that wrote 10 pages has %d of its own", n)
		}
		if got := wordAt(t, child, 64*mib+3*pageSize); got != 1<<40+3 {
			t.Errorf("the child wrote %#x", got)
		}
		if got := binary.LittleEndian.Uint64(first.content(t, 64*mib/pageSize+3)); got != 1<<32+3 {
			t.Errorf("the parent's page is %#x", got)
		}
		// A fork of the fork sleeps where its parent does, over both layers.
		grandchild, _ := restore(t, s, second)
		if got := wordAt(t, grandchild, 64*mib+3*pageSize); got != 1<<40+3 {
			t.Errorf("the grandchild has %#x", got)
		}
		if got := wordAt(t, grandchild, 64*mib+500*pageSize); got != 1<<32+500 {
			t.Errorf("the grandchild has %#x from the root", got)
		}
		grandchild.Pause()
	}
	if !parent.Running() {
		t.Error("the parent does not run")
	}
}
