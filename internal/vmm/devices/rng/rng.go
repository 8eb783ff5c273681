// Package rng is a virtio-rng device: the guest asks for entropy and gets it from the
// host kernel's generator. It has no state, so a fork never gets what its parent or a sibling got.
package rng

import (
	"encoding/binary"
	"errors"
	"fmt"

	"golang.org/x/sys/unix"

	"forkd.dev/forkd/internal/vmm/devices/devstate"
	"forkd.dev/forkd/internal/vmm/virtio"
)

const (
	queueSize = 8
	// maxRequest bounds the time a request takes; the guest asks again for more. It is also how much
	// getrandom gives without being interrupted by signals.
	maxRequest = 256
)

// Device is the source of entropy.
type Device struct {
	bus   virtio.Bus
	chain virtio.Chain
	fill  func([]byte) error
}

// New returns a device that asks the kernel's getrandom.
func New() *Device { return &Device{fill: getrandom} }

func getrandom(b []byte) error {
	for len(b) > 0 {
		n, err := unix.Getrandom(b, 0)
		if err != nil && !errors.Is(err, unix.EINTR) {
			return fmt.Errorf("get entropy of the host: %w", err)
		}
		b = b[max(n, 0):]
	}
	return nil
}

// Attach implements what a Transport calls once.
func (d *Device) Attach(b virtio.Bus) { d.bus = b }

// Type implements virtio.Device, as do the methods below.
func (d *Device) Type() uint32 { return virtio.TypeEntropy }

// Features implements virtio.Device.
func (d *Device) Features() uint64 { return 0 }

// QueueSizes implements virtio.Device.
func (d *Device) QueueSizes() []uint16 { return []uint16{queueSize} }

// ReadConfig implements virtio.Device: there is no configuration.
func (d *Device) ReadConfig([]byte, uint32) {}

// WriteConfig implements virtio.Device.
func (d *Device) WriteConfig([]byte, uint32) {}

// Start implements virtio.Device.
func (d *Device) Start() {}

// Reset implements virtio.Device.
func (d *Device) Reset() {}

// Process implements virtio.Device.
func (d *Device) Process(i int) error {
	q := d.bus.Queue(i)
	for {
		ok, err := q.Pop(&d.chain)
		if err != nil || !ok {
			return err
		}
		written := 0
		for _, b := range d.chain.Writable {
			b = b[:min(len(b), maxRequest-written)]
			if err := d.fill(b); err != nil {
				return err
			}
			written += len(b)
		}
		q.Push(d.chain.Head, uint32(written))
	}
}

const stateVersion = 1

// AppendState implements virtio.Device.
func (d *Device) AppendState(b []byte) []byte {
	return binary.LittleEndian.AppendUint16(b, stateVersion)
}

// LoadState implements virtio.Device.
func (d *Device) LoadState(b []byte) error {
	return devstate.NewDecoder(b, "entropy device", stateVersion).Close()
}
