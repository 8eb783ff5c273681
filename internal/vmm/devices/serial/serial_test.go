package serial

import (
	"bytes"
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"forkd.dev/forkd/internal/vmm/devices"
	vt "forkd.dev/forkd/internal/vmm/virtio/virtiotest"
)

type rig struct {
	out   bytes.Buffer
	line  vt.Line
	clock vt.Clock
	*Device
}

func newRig(t testing.TB, limit devices.Rate) *rig {
	r := &rig{}
	d, err := New(Config{Output: &r.out, Interrupt: &r.line, Clock: &r.clock, Limit: limit})
	if err != nil {
		t.Fatal(err)
	}
	r.Device = d
	return r
}

func (r *rig) in(off uint64) byte {
	b := []byte{0}
	r.Read(off, b)
	return b[0]
}

func (r *rig) outb(off uint64, v byte) { r.Write(off, []byte{v}) }

// TestLinuxProbe is what Linux's 8250 driver asks to find out that this is a 16550A.
func TestLinuxProbe(t *testing.T) {
	r := newRig(t, devices.Rate{})
	r.outb(regIntrEnable, 0)
	if r.in(regIntrEnable) != 0 {
		t.Error("interrupts enabled")
	}
	r.outb(regIntrEnable, 0x0f)
	if r.in(regIntrEnable) != 0x0f {
		t.Error("interrupt enable register does not hold")
	}
	r.outb(regIntrEnable, 0)
	r.outb(regModemCtrl, modemLoop|0x0a)
	if got := r.in(regModemStatus) & 0xf0; got != 0x90 {
		t.Errorf("loop-back gives %#x", got)
	}
	r.outb(regModemCtrl, 0)
	r.outb(regIntrID, fifoEnable)
	if got := r.in(regIntrID) >> 6; got != 3 {
		t.Errorf("FIFO bits %d", got)
	}
	r.outb(regLineControl, lineDivisor)
	r.outb(0, 0x0c)
	r.outb(1, 0)
	if r.in(0) != 0x0c || r.in(1) != 0 {
		t.Error("divisor does not hold")
	}
	r.outb(regLineControl, 3)
	r.outb(regScratch, 0x5a)
	if r.in(regScratch) != 0x5a || r.in(regLineStatus) != lineIdle {
		t.Error("scratch or line status")
	}
	if r.out.Len() != 0 {
		t.Errorf("probing printed %q", r.out.String())
	}
}

// TestTransmitInterrupts: the driver enables the interrupt, gets one, and one more after each byte.
func TestTransmitInterrupts(t *testing.T) {
	r := newRig(t, devices.Rate{})
	r.outb(regIntrEnable, intrTransmit)
	for i, c := range []byte("hi\n") {
		if n := r.line.Take(); n != 1 {
			t.Fatalf("byte %d: %d interrupts", i, n)
		}
		if id := r.in(regIntrID); id != idTransmit {
			t.Fatalf("byte %d: identification %#x", i, id)
		}
		if id := r.in(regIntrID); id != idNone {
			t.Fatalf("byte %d: reading did not clear it: %#x", i, id)
		}
		r.outb(regData, c)
	}
	if r.out.String() != "hi\n" {
		t.Errorf("printed %q", r.out.String())
	}
}

func TestIncompleteLine(t *testing.T) {
	r := newRig(t, devices.Rate{})
	for _, c := range []byte("login: ") {
		r.outb(regData, c)
	}
	if r.out.Len() != 0 || r.clock.Pending() != 1 {
		t.Fatalf("%q at once, %d timers", r.out.String(), r.clock.Pending())
	}
	r.clock.Advance(lineDelay)
	if r.out.String() != "login: " || r.clock.Pending() != 0 {
		t.Fatalf("%q, %d timers", r.out.String(), r.clock.Pending())
	}
	r.outb(regData, 'x')
	r.Pause()
	if r.out.String() != "login: x" {
		t.Fatalf("%q after a pause", r.out.String())
	}
}

func TestFlood(t *testing.T) {
	r := newRig(t, devices.Rate{PerSecond: 1000, Burst: 100})
	flood := func() {
		for range 10_000 {
			r.outb(regData, 'x')
		}
	}
	flood()
	if n := strings.Count(r.out.String(), "x") + len(r.Device.line); n > 100 {
		t.Errorf("%d bytes went through at once", n)
	}
	r.clock.Advance(50 * time.Millisecond)
	flood()
	r.Flush()
	if !strings.Contains(r.out.String(), "[forkd: 9900 bytes of output dropped") {
		t.Errorf("%q", r.out.String())
	}
}

func TestState(t *testing.T) {
	a, b := newRig(t, devices.Rate{}), newRig(t, devices.Rate{})
	a.outb(regLineControl, lineDivisor)
	a.outb(0, 7)
	a.outb(regLineControl, 3)
	a.outb(regIntrEnable, 3)
	a.outb(regScratch, 9)
	state := a.AppendState(nil)
	if err := b.LoadState(state); err != nil {
		t.Fatal(err)
	}
	b.Resume()
	if b.line.Take() != 1 {
		t.Error("a pending interrupt is lost")
	}
	if !bytes.Equal(b.AppendState(nil), state) {
		t.Error("state differs")
	}
	for n := range state {
		if b.LoadState(state[:n]) == nil {
			t.Errorf("%d bytes were accepted", n)
		}
	}
}

func TestLogKeepsTheEnd(t *testing.T) {
	f, err := os.CreateTemp(t.TempDir(), "log")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	l, err := NewLog(f, 8<<10)
	if err != nil {
		t.Fatal(err)
	}
	var all []byte
	for i := range 5000 {
		line := fmt.Appendf(nil, "line %d\n", i)
		all = append(all, line...)
		if _, err := l.Write(line); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := l.Write(bytes.Repeat([]byte{'y'}, 100<<10)); err != nil {
		t.Fatal(err)
	}
	all = append(all, bytes.Repeat([]byte{'y'}, 4<<10)...)
	got, err := os.ReadFile(f.Name())
	if err != nil {
		t.Fatal(err)
	}
	if len(got) > 8<<10 || len(got) < 4<<10 || !bytes.HasSuffix(all, got) {
		t.Errorf("%d bytes are kept, or not the last ones", len(got))
	}
}

func FuzzPort(f *testing.F) {
	f.Add([]byte{0, 'a', 1, 2, 3, 0x80, 0, 1, 4, 0x1f, 12, 0})
	f.Fuzz(func(t *testing.T, program []byte) {
		r := newRig(t, devices.Rate{PerSecond: 10, Burst: 10})
		for ; len(program) >= 2; program = program[2:] {
			if op := program[0] % 18; op < 8 {
				r.outb(uint64(op), program[1])
			} else if op < 16 {
				r.Read(uint64(op-8), make([]byte, program[1]%9))
			} else if err := r.LoadState(r.AppendState(nil)); err != nil {
				t.Fatal(err)
			}
		}
		if n := r.out.Len(); n > 300 {
			t.Fatalf("%d bytes went through", n)
		}
	})
}

func FuzzLoadState(f *testing.F) {
	f.Add(newRig(f, devices.Rate{}).AppendState(nil))
	f.Fuzz(func(t *testing.T, state []byte) {
		r := newRig(t, devices.Rate{})
		if r.LoadState(state) == nil && !bytes.Equal(r.AppendState(nil), state) {
			t.Fatal("accepted state is not what is saved")
		}
	})
}

func TestGoldenState(t *testing.T) {
	r := newRig(t, devices.Rate{})
	r.outb(regLineControl, lineDivisor)
	r.outb(0, 7)
	r.outb(regLineControl, 3)
	r.outb(regIntrEnable, 2)
	if err := r.LoadState(vt.Golden(t, "serial_v1", r.AppendState(nil))); err != nil {
		t.Fatal(err)
	}
}
