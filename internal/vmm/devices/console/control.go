package console

import (
	"encoding/binary"

	"forkd.dev/forkd/internal/vmm/devices"
)

// Control messages (5.3.6.2): port u32, event u16, value u16.
const (
	eventDeviceReady = 0
	eventPortAdd     = 1
	eventPortReady   = 3
	eventPortOpen    = 6
	eventPortName    = 7

	messageLen = 8
)

// readControl takes what the guest's driver says. What makes no sense is ignored: a driver
// may know more than we do.
func (d *Device) readControl() error {
	q := d.bus.Queue(controlFromGuest)
	for {
		ok, err := q.Pop(&d.chain)
		if err != nil || !ok {
			return err
		}
		var m [messageLen]byte
		if devices.Gather(m[:], d.chain.Readable) == messageLen {
			le := binary.LittleEndian
			d.control(le.Uint32(m[:]), le.Uint16(m[4:]), le.Uint16(m[6:]))
		}
		q.Push(d.chain.Head, 0)
	}
}

func (d *Device) control(id uint32, event, value uint16) {
	if event == eventDeviceReady {
		for _, p := range d.ports {
			p.sendAdd = value == 1
		}
		return
	}
	if id == 0 || id > uint32(len(d.ports)) {
		return
	}
	p := d.ports[id-1]
	switch event {
	case eventPortReady:
		p.ready, p.sendName = value == 1, value == 1
		p.told = false // a new port begins unconnected
	case eventPortOpen:
		p.guestOpen = value == 1
		if c := d.conn(int(id) - 1); c != nil && p.guestOpen {
			c.WantInput()
		}
	}
}

// writeControl tells the guest what it does not know yet, as far as it has given buffers.
func (d *Device) writeControl() error {
	for i, p := range d.ports {
		for {
			event, value := p.news(d.conn(i) != nil)
			if event == 0 {
				break
			}
			ok, err := d.sendControl(p, event, value)
			if err != nil || !ok {
				return err
			}
			switch event {
			case eventPortAdd:
				p.sendAdd = false
			case eventPortName:
				p.sendName = false
			case eventPortOpen:
				p.told = value == 1
			}
		}
	}
	return nil
}

// news returns the next message for the guest, or event 0.
func (p *port) news(connected bool) (event, value uint16) {
	switch {
	case p.sendAdd:
		return eventPortAdd, 1
	case p.sendName:
		return eventPortName, 1
	case p.ready && p.told != connected && connected:
		return eventPortOpen, 1
	case p.ready && p.told != connected:
		return eventPortOpen, 0
	}
	return 0, 0
}

func (d *Device) sendControl(p *port, event, value uint16) (bool, error) {
	q := d.bus.Queue(controlToGuest)
	ok, err := q.Pop(&d.chain)
	if err != nil || !ok {
		return false, err
	}
	var b [messageLen + maxName]byte
	le := binary.LittleEndian
	le.PutUint32(b[:], p.id)
	le.PutUint16(b[4:], event)
	le.PutUint16(b[6:], value)
	n := messageLen
	if event == eventPortName {
		n += copy(b[messageLen:], p.name)
	}
	q.Push(d.chain.Head, uint32(devices.Scatter(d.chain.Writable, b[:n])))
	return true, nil
}
