// Package devices holds what the device models below it have in common: time and
// rate limits. Each device has a package of its own:
//
//	block    disk of copy-on-write layers (virtio-blk over internal/layerfmt/cow1)
//	console  byte streams by name: the agent channel (virtio-console, multiport)
//	rng      entropy of the host (virtio-rng)
//	nic      frames over a descriptor (virtio-net)
//	balloon  memory given back, free page reporting (virtio-balloon)
//	serial   the kernel log (16550A)
//
// Every virtio device is made with New(Config), handed to virtio.NewTransport, and
// from then on reached by the guest through the transport only; what the host side can
// do stands on the device's own type.
package devices

import "time"

// Clock is the host's monotonic clock.
type Clock interface {
	// Now is the time since some fixed moment.
	Now() time.Duration
	// AfterFunc calls f once, on another goroutine, after d.
	AfterFunc(d time.Duration, f func()) Timer
}

// Timer is a pending call of [Clock.AfterFunc].
type Timer interface {
	// Stop prevents the call if it has not begun, and says whether it did.
	Stop() bool
}
