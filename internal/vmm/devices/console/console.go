package console

import (
	"encoding/binary"
	"os"
	"sync"
	"sync/atomic"

	"forkd.dev/forkd/internal/errdefs"
	"forkd.dev/forkd/internal/vmm/devices/devstate"
	"forkd.dev/forkd/internal/vmm/virtio"
)

// Sizes of the queues and limits.
const (
	dataQueue    = 64
	controlQueue = 16
	maxPorts     = 8
	maxName      = 64
	// maxBurst bounds what goes through a port before the device's lock is free for others.
	maxBurst = 1 << 20
)

const featureMultiport = 1 << 1

// Queues of the control messages, and of the first port: port 0 has none here, because the
// guest takes it for its console.
const (
	controlToGuest   = 2
	controlFromGuest = 3
	firstPortQueue   = 4
)

// Device is the console. Its methods beside those of virtio.Device are for the host.
type Device struct {
	bus   virtio.Bus
	ports []*port
	chain virtio.Chain

	pumps sync.WaitGroup

	mu     sync.Mutex
	closed bool
	// conns holds the connection of each port, or nil. Guarded by mu.
	conns []*connection

	fromGuest, toGuest atomic.Uint64
}

// port is what the guest knows of a port. All of it is device state.
type port struct {
	id   uint32
	name string

	ready     bool   // the guest's driver has it
	guestOpen bool   // a program of the guest has it open
	told      bool   // the guest believes that the host is connected
	sendAdd   bool   // messages to the guest that wait for a buffer
	sendName  bool   //
	sent      uint64 // bytes of the first request of the queue that the host has already
}

// New returns a console with ports of these names. The port numbers begin with 1.
func New(names ...string) (*Device, error) {
	if len(names) == 0 || len(names) > maxPorts {
		return nil, errdefs.New(errdefs.ErrInvalid, "console: %d ports, 1 to %d are possible", len(names), maxPorts)
	}
	d := &Device{conns: make([]*connection, len(names))}
	for i, name := range names {
		if name == "" || len(name) > maxName {
			return nil, errdefs.New(errdefs.ErrInvalid, "console: port name of %d bytes, 1 to %d are possible", len(name), maxName)
		}
		d.ports = append(d.ports, &port{id: uint32(i) + 1, name: name})
	}
	return d, nil
}

func queueToGuest(i int) int   { return firstPortQueue + 2*i }
func queueFromGuest(i int) int { return firstPortQueue + 2*i + 1 }

// Connect makes f the host's end of the port with that index (the first name of New is 0) in place of what was. f is
// a non-blocking stream, usually an accepted unix socket; it belongs to the device, also after an
// error, which closes it when the other side does, when it is replaced, and in Close.
func (d *Device) Connect(i int, f *os.File) error {
	if i < 0 || i >= len(d.ports) {
		f.Close()
		return errdefs.New(errdefs.ErrInvalid, "console: connect port %d of %d", i, len(d.ports))
	}
	c, err := newConnection(d, i, f)
	if err != nil {
		f.Close()
		return err
	}
	d.mu.Lock()
	if d.closed {
		d.mu.Unlock()
		f.Close()
		return errdefs.New(errdefs.ErrUnavailable, "console: connect port %d: the device is closed", i)
	}
	old := d.conns[i]
	d.conns[i] = c
	c.Start()
	d.mu.Unlock()
	if old != nil {
		old.Close()
	}
	d.bus.Kick(controlToGuest)
	d.bus.Kick(queueFromGuest(i))
	d.bus.Kick(queueToGuest(i))
	return nil
}

// Connected tells whether the port has a connection.
func (d *Device) Connected(i int) bool { return d.conn(i) != nil }

// Counters returns the bytes that went through all ports since the device was made.
func (d *Device) Counters() (toGuest, fromGuest uint64) {
	return d.toGuest.Load(), d.fromGuest.Load()
}

// Close ends all connections and waits for their goroutines. It may be repeated.
func (d *Device) Close() {
	d.mu.Lock()
	d.closed = true
	conns := append([]*connection(nil), d.conns...)
	clear(d.conns)
	d.mu.Unlock()
	for _, c := range conns {
		if c != nil {
			c.Close()
		}
	}
	d.pumps.Wait()
}

func (d *Device) conn(i int) *connection {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.conns[i]
}

// forget takes a connection away from its port, unless it was replaced already.
func (d *Device) forget(c *connection) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.conns[c.port] == c {
		d.conns[c.port] = nil
	}
}

// Attach implements what a Transport calls once.
func (d *Device) Attach(b virtio.Bus) { d.bus = b }

// Type implements virtio.Device, as do the methods below.
func (d *Device) Type() uint32 { return virtio.TypeConsole }

// Features implements virtio.Device.
func (d *Device) Features() uint64 { return featureMultiport }

// QueueSizes implements virtio.Device.
func (d *Device) QueueSizes() []uint16 {
	sizes := []uint16{dataQueue, dataQueue, controlQueue, controlQueue}
	for range d.ports {
		sizes = append(sizes, dataQueue, dataQueue)
	}
	return sizes
}

// ReadConfig implements virtio.Device.
func (d *Device) ReadConfig(p []byte, off uint32) {
	var c [12]byte // columns, rows, ports, emergency write
	binary.LittleEndian.PutUint32(c[4:], uint32(len(d.ports))+1)
	if off < uint32(len(c)) {
		copy(p, c[off:])
	}
}

// WriteConfig implements virtio.Device: the emergency write is not offered.
func (d *Device) WriteConfig([]byte, uint32) {}

// Start implements virtio.Device.
func (d *Device) Start() {}

// Reset implements virtio.Device. Connections stay.
func (d *Device) Reset() {
	for _, p := range d.ports {
		*p = port{id: p.id, name: p.name}
	}
}

// ResetQueue implements what a Transport calls when a queue is taken out of use.
func (d *Device) ResetQueue(q int) {
	if i := q - firstPortQueue; i >= 0 && i%2 == 1 {
		d.ports[i/2].sent = 0
	}
}

// Process implements virtio.Device.
func (d *Device) Process(q int) error {
	switch {
	case q == controlFromGuest:
		if err := d.readControl(); err != nil {
			return err
		}
		return d.writeControl()
	case q == controlToGuest:
		return d.writeControl()
	case q < firstPortQueue:
		return nil // port 0 does not exist; its buffers stay with us
	}
	i := (q - firstPortQueue) / 2
	if q == queueFromGuest(i) {
		return d.transmit(i)
	}
	if c := d.conn(i); c != nil {
		c.WantInput()
	}
	return nil
}

const stateVersion = 1

// Flags of a port in the state.
const (
	flagReady = 1 << iota
	flagGuestOpen
	flagTold
	flagSendAdd
	flagSendName
	allFlags = 1<<iota - 1
)

// AppendState implements virtio.Device: version u16, number of ports u8, and for each its
// name, flags u8 and the bytes already sent of the first request u64.
func (d *Device) AppendState(b []byte) []byte {
	b = binary.LittleEndian.AppendUint16(b, stateVersion)
	b = append(b, byte(len(d.ports)))
	for _, p := range d.ports {
		b = devstate.AppendBytes(b, []byte(p.name))
		flags := byte(0)
		for i, f := range p.flags() {
			if *f {
				flags |= 1 << i
			}
		}
		b = append(b, flags)
		b = binary.LittleEndian.AppendUint64(b, p.sent)
	}
	return b
}

func (p *port) flags() [5]*bool {
	return [5]*bool{&p.ready, &p.guestOpen, &p.told, &p.sendAdd, &p.sendName}
}

// LoadState implements virtio.Device.
func (d *Device) LoadState(b []byte) error {
	dec := devstate.NewDecoder(b, "console", stateVersion)
	if n := int(dec.Uint8()); dec.Err() == nil && n != len(d.ports) {
		return errdefs.New(errdefs.ErrIncompatible, "state is of a console with %d ports, this one has %d", n, len(d.ports))
	}
	for _, p := range d.ports {
		if name := dec.Bytes(maxName); dec.Err() == nil && string(name) != p.name {
			return errdefs.New(errdefs.ErrIncompatible, "state is of a console with a port %.64q, this one has %q", name, p.name)
		}
		flags := dec.Uint8()
		if flags&^allFlags != 0 {
			dec.Fail("has unknown port flags %#x", flags)
		}
		for i, f := range p.flags() {
			*f = flags&(1<<i) != 0
		}
		p.sent = dec.Uint64()
	}
	return dec.Close()
}
