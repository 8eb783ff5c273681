// Package serial is a 16550A serial port that only sends: the guest kernel's log.
//
// What the guest writes goes to a writer, usually a [Log], through a rate limit: more than that is dropped,
// counted and noted in the output, so that a guest which floods its console costs the host neither
// disk nor time. A line that is not complete is written out after a moment.
//
// The port is made to Linux's driver, which probes it by its loop-back mode and then sends by
// interrupt: an empty transmitter interrupts when that is enabled and after each byte.
package serial

import (
	"encoding/binary"
	"fmt"
	"io"
	"sync"
	"time"

	"forkd.dev/forkd/internal/errdefs"
	"forkd.dev/forkd/internal/vmm/devices"
	"forkd.dev/forkd/internal/vmm/devices/devstate"
)

// Ports is how many ports the device takes.
const Ports = 8

// Registers by offset; some have another meaning when the divisor latch is accessible.
const (
	regData        = 0
	regIntrEnable  = 1
	regIntrID      = 2 // FIFO control when written
	regLineControl = 3
	regModemCtrl   = 4
	regLineStatus  = 5
	regModemStatus = 6
	regScratch     = 7
)

// Bits of the registers.
const (
	intrTransmit   = 0x02 // enable: transmitter empty
	intrEnableMask = 0x0f
	idNone         = 0x01
	idTransmit     = 0x02
	idFIFO         = 0xc0
	fifoEnable     = 0x01
	lineDivisor    = 0x80
	lineIdle       = 0x60 // transmitter and its holding register are empty
	modemLoop      = 0x10
	modemConnected = 0xb0 // carrier, data set ready, clear to send
	modemMask      = 0x1f
)

const (
	lineBuffer = 1 << 10
	// lineDelay is how long an incomplete line waits for its end.
	lineDelay = 50 * time.Millisecond
)

// Interrupter raises the interrupt line of the port.
type Interrupter interface {
	// Raise makes one edge. It does not block.
	Raise()
}

// Config is what a Device needs. All but Limit is required.
type Config struct {
	Output    io.Writer // errors are ignored: a guest does not fail for its log
	Interrupt Interrupter
	Clock     devices.Clock
	Limit     devices.Rate // bytes
}

// Device is the port. All methods may be called concurrently.
type Device struct {
	cfg Config

	mu sync.Mutex
	// All below is guarded by mu. Output is written under it: a Log is a file.
	bucket  devices.Bucket
	line    []byte
	timer   devices.Timer
	dropped uint64

	intrEnable, lineControl, modemCtrl, scratch, fifo byte
	divisor                                           [2]byte
	empty                                             bool // the transmitter interrupt is pending
}

// New returns a port.
func New(cfg Config) (*Device, error) {
	if cfg.Output == nil || cfg.Interrupt == nil || cfg.Clock == nil {
		return nil, errdefs.New(errdefs.ErrInvalid, "serial port: output, interrupt and clock are required")
	}
	return &Device{cfg: cfg, bucket: devices.NewBucket(cfg.Limit, cfg.Clock.Now()), line: make([]byte, 0, lineBuffer)}, nil
}

// Read answers a read of the guest.
func (d *Device) Read(off uint64, p []byte) {
	clear(p)
	d.mu.Lock()
	defer d.mu.Unlock()
	if len(p) > 0 {
		p[0] = d.readLocked(off)
	}
}

func (d *Device) readLocked(off uint64) byte {
	latch := d.lineControl&lineDivisor != 0
	switch off {
	case regData, regIntrEnable:
		if latch {
			return d.divisor[off]
		}
		if off == regIntrEnable {
			return d.intrEnable
		}
		return 0 // nothing is ever received
	case regIntrID:
		id := byte(idNone)
		if d.empty && d.intrEnable&intrTransmit != 0 {
			id, d.empty = idTransmit, false
		}
		if d.fifo&fifoEnable != 0 {
			id |= idFIFO
		}
		return id
	case regLineControl:
		return d.lineControl
	case regModemCtrl:
		return d.modemCtrl
	case regLineStatus:
		return lineIdle
	case regModemStatus:
		if d.modemCtrl&modemLoop == 0 {
			return modemConnected
		}
		// The four outputs come back as inputs: DTR, RTS, OUT1, OUT2 as DSR, CTS, RI, DCD.
		m := d.modemCtrl
		return m&1<<5 | m&2<<3 | m&4<<4 | m&8<<4
	case regScratch:
		return d.scratch
	}
	return 0
}

// Write takes a write of the guest.
func (d *Device) Write(off uint64, p []byte) {
	if len(p) == 0 {
		return
	}
	d.mu.Lock()
	raise := d.writeLocked(off, p[0])
	d.mu.Unlock()
	if raise {
		d.cfg.Interrupt.Raise()
	}
}

// writeLocked tells whether the interrupt is to be raised.
func (d *Device) writeLocked(off uint64, v byte) bool {
	switch latch := d.lineControl&lineDivisor != 0; {
	case off <= regIntrEnable && latch:
		d.divisor[off] = v
	case off == regData:
		if d.modemCtrl&modemLoop == 0 {
			d.sendLocked(v)
		}
		return d.emptiedLocked()
	case off == regIntrEnable:
		d.intrEnable = v & intrEnableMask
		return d.emptiedLocked()
	case off == regIntrID:
		d.fifo = v & fifoEnable
	case off == regLineControl:
		d.lineControl = v
	case off == regModemCtrl:
		d.modemCtrl = v & modemMask
	case off == regScratch:
		d.scratch = v
	}
	return false
}

func (d *Device) emptiedLocked() bool {
	d.empty = true
	return d.intrEnable&intrTransmit != 0
}

func (d *Device) sendLocked(b byte) {
	if d.bucket.Limited() {
		if d.bucket.Wait(d.cfg.Clock.Now()) > 0 {
			d.dropped++
			return
		}
		d.bucket.Use(1)
	}
	if d.dropped > 0 {
		d.flushLocked()
		_, _ = fmt.Fprintf(d.cfg.Output, "\n[forkd: %d bytes of output dropped, there was too much]\n", d.dropped)
		d.dropped = 0
	}
	d.line = append(d.line, b)
	if b == '\n' || len(d.line) == lineBuffer {
		d.flushLocked()
	} else if d.timer == nil {
		d.timer = d.cfg.Clock.AfterFunc(lineDelay, d.Flush)
	}
}

// Flush writes out what there is of an incomplete line.
func (d *Device) Flush() {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.flushLocked()
}

func (d *Device) flushLocked() {
	if d.timer != nil {
		d.timer.Stop()
		d.timer = nil
	}
	if len(d.line) > 0 {
		_, _ = d.cfg.Output.Write(d.line)
		d.line = d.line[:0]
	}
}

// Pause writes out what there is. Nothing happens on its own, so there is nothing to stop.
func (d *Device) Pause() { d.Flush() }

// Resume raises an interrupt that may have been lost.
func (d *Device) Resume() {
	d.mu.Lock()
	raise := d.empty && d.intrEnable&intrTransmit != 0
	d.mu.Unlock()
	if raise {
		d.cfg.Interrupt.Raise()
	}
}

const stateVersion = 1

// AppendState appends the registers. What was sent belongs to the host and is not state.
func (d *Device) AppendState(b []byte) []byte {
	d.mu.Lock()
	defer d.mu.Unlock()
	b = binary.LittleEndian.AppendUint16(b, stateVersion)
	b = append(b, d.intrEnable, d.lineControl, d.modemCtrl, d.scratch, d.fifo, d.divisor[0], d.divisor[1])
	return devstate.AppendBool(b, d.empty)
}

// LoadState restores what AppendState wrote.
func (d *Device) LoadState(b []byte) error {
	dec := devstate.NewDecoder(b, "serial port", stateVersion)
	var r [7]byte
	for i := range r {
		r[i] = dec.Uint8()
	}
	empty := dec.Bool()
	if r[0]&^intrEnableMask != 0 || r[2]&^modemMask != 0 || r[4]&^fifoEnable != 0 {
		dec.Fail("has impossible registers % x", r)
	}
	if err := dec.Close(); err != nil {
		return err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.intrEnable, d.lineControl, d.modemCtrl, d.scratch, d.fifo = r[0], r[1], r[2], r[3], r[4]
	d.divisor = [2]byte{r[5], r[6]}
	d.empty = empty
	return nil
}
