package virtio

// GuestMemory turns guest-physical addresses into bytes.
type GuestMemory interface {
	// Slice returns the n bytes at guest-physical address addr, shared with the guest.
	// It fails unless the whole range lies in one piece of memory; addr and n are any
	// numbers, sums may wrap. The slice stays valid, and the place of the same bytes,
	// for as long as the machine exists, whatever is restored into them. The host
	// address of an even guest address is even, and so up to 16.
	Slice(addr, n uint64) ([]byte, error)
}

// Interrupter raises the interrupt of one device.
type Interrupter interface {
	// Raise makes one edge on the interrupt line. It does not block. Too many calls
	// do no harm.
	Raise()
}

// Device is what stands behind a [Transport]. All methods are called with the
// Transport's lock held, so they need none for what only they use.
type Device interface {
	// Type is the device id of the specification (section 5), e.g. 2 for a block device.
	Type() uint32
	// Features are the bits the device offers beside those of transport and queues.
	// They never change.
	Features() uint64
	// QueueSizes are the largest lengths of its queues, powers of two up to 1,024.
	QueueSizes() []uint16
	// ReadConfig fills p from offset off of the configuration space; what lies outside
	// of it stays zero. WriteConfig is a write by the driver; most devices ignore it.
	ReadConfig(p []byte, off uint32)
	WriteConfig(p []byte, off uint32)
	// Start is called when the driver is ready: queues can be used from now on.
	Start()
	// Reset is called when the driver resets the device: back to the state after New,
	// except for what belongs to the host.
	Reset()
	// Process works on what is available in queue i until Pop finds no more or the
	// device has to wait for something else. An error says what the guest did wrong and
	// ends the device until it is reset.
	Process(i int) error
	// AppendState and LoadState carry what is not in the queues. The encoding starts
	// with a version; LoadState checks all of it and is called before Start.
	AppendState(b []byte) []byte
	LoadState(b []byte) error
}

// Bus is what a device sees of its [Transport].
type Bus interface {
	// Queue returns queue i. Its methods need the lock, so they are for Device methods.
	Queue(i int) *Queue
	// Negotiated returns the features that driver and device agreed on.
	Negotiated() uint64
	// ConfigChanged tells the driver that the configuration space changed. Lock held.
	ConfigChanged()
	// Interrupt raises the interrupt for what was pushed so far, if the driver wants it.
	// It is done anyway when Process returns. Lock held.
	Interrupt()
	// Kick has the queue processed soon; for goroutines of the device. Lock not held.
	Kick(i int)
	// Exclusive calls f with the lock held, unless the device is paused, not started or
	// failed; then it returns false and f was not called. An error of f is one of
	// Process.
	Exclusive(f func() error) bool
}
