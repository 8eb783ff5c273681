package virtio

import (
	"encoding/binary"
	"fmt"

	"forkd.dev/forkd/internal/errdefs"
)

// Limits of what one request may be made of.
const (
	// MaxQueueSize bounds what a device may offer as the length of a queue.
	MaxQueueSize = 1024
	// MaxChain bounds the descriptors of a chain with an indirect table; without one
	// the length of the queue does.
	MaxChain = 1024
	// maxChainBytes is the specification's bound for a chain (2.7.5).
	maxChainBytes = 1 << 32
)

// Descriptor flags and sizes (2.7.5 to 2.7.8).
const (
	descNext     = 1
	descWrite    = 2
	descIndirect = 4
	descLen      = 16
	availNoIntr  = 1
	usedElemLen  = 8
	ringHeader   = 4 // flags and index of either ring
)

// What a guest can get wrong about a queue. All are of class errdefs.ErrGuest.
var (
	errAvailIndex  = guestError("available index is more than a queue length ahead")
	errHead        = guestError("head of a chain is beyond the descriptor table")
	errNext        = guestError("next descriptor is beyond the table")
	errLoop        = guestError("chain has more descriptors than allowed, perhaps a loop")
	errOrder       = guestError("readable descriptor after a writable one")
	errEmpty       = guestError("descriptor of length zero")
	errLong        = guestError("chain has more than 4 GiB")
	errAddress     = guestError("buffer is not inside of guest memory")
	errIndirect    = guestError("indirect descriptor that was not negotiated, has a next one or is inside of a table")
	errTable       = guestError("indirect table is empty or not a whole number of descriptors")
	errTableMemory = guestError("indirect table is not inside of guest memory")
)

func guestError(text string) error { return errdefs.New(errdefs.ErrGuest, "%s", text) }

// Queue is one split virtqueue. Its methods need the lock of its [Transport].
type Queue struct {
	mem   GuestMemory
	limit uint16 // largest length offered

	// As the driver set it.
	size              uint16
	ready             bool
	desc, avail, used uint64

	// The three areas, while ready.
	descMem, availMem, usedMem []byte

	eventIdx, indirect bool // negotiated

	nextAvail uint16 // next entry of the available ring to take
	nextUsed  uint16 // next entry of the used ring to fill
	signalled uint16 // nextUsed when the driver was last considered for an interrupt
	// seenAvail is the driver's index when it was last read; entries before it are ours to take.
	seenAvail uint16
	// turn is how many chains may be taken until the lock must be let go once; more
	// tells that it ran out.
	turn uint16
	more bool

	barrier uint32
}

// Chain is one request: the buffers of a chain of descriptors. A device keeps one and
// has it filled again and again.
type Chain struct {
	Head uint16 // what Push gives back
	// Readable and Writable are guest memory, in order. Empty buffers do not occur.
	Readable, Writable [][]byte
	// WritableAt are the guest-physical addresses of Writable.
	WritableAt []uint64
	// ReadLen and WriteLen are the sums of their lengths, at most 4 GiB together.
	ReadLen, WriteLen uint64
}

// Ready tells whether the driver has set the queue up.
func (q *Queue) Ready() bool { return q.ready }

// Size is the length that the driver chose.
func (q *Queue) Size() uint16 { return q.size }

// Pop takes the next chain. It returns false if there is none, and then the driver is
// going to notify when there is one, or if the device has had its turn, and then
// Process is called again at once. The chain stays valid until the next Pop.
func (q *Queue) Pop(c *Chain) (bool, error) {
	if !q.ready {
		return false, nil
	}
	if q.nextAvail == q.seenAvail {
		if ok, err := q.look(); !ok {
			return false, err
		}
	}
	if q.turn == 0 {
		q.more = true
		return false, nil
	}
	head := binary.LittleEndian.Uint16(q.availMem[ringHeader+2*int(q.nextAvail&(q.size-1)):])
	if err := q.walk(c, head); err != nil {
		return false, err
	}
	q.turn--
	q.nextAvail++
	return true, nil
}

// look reads the driver's index, and if it has not moved asks to be notified.
func (q *Queue) look() (bool, error) {
	q.seenAvail = load16(q.availMem, 2)
	if q.seenAvail == q.nextAvail {
		if q.eventIdx {
			store16(q.usedMem, ringHeader+usedElemLen*int(q.size), q.nextAvail)
		}
		// The driver adds and looks at our wish, we wish and look at what it added.
		fence(&q.barrier)
		q.seenAvail = load16(q.availMem, 2)
		if q.seenAvail == q.nextAvail {
			return false, nil
		}
	}
	if q.seenAvail-q.nextAvail > q.size {
		n := q.seenAvail - q.nextAvail
		q.seenAvail = q.nextAvail
		return false, fmt.Errorf("%d entries in a queue of %d: %w", n, q.size, errAvailIndex)
	}
	// What the driver wrote before its index is read after it.
	fence(&q.barrier)
	return true, nil
}

// Available tells whether Pop would find a chain, without asking for a notification.
func (q *Queue) Available() bool {
	return q.ready && (q.nextAvail != q.seenAvail || load16(q.availMem, 2) != q.nextAvail)
}

// Return gives the chain of the last Pop back: the next Pop takes it again. Nothing may have been pushed
// since for it.
func (q *Queue) Return() {
	q.nextAvail--
	q.turn++
}

// Yield has the device called again at once, after the lock was free for others. For long requests that
// were given back in the middle.
func (q *Queue) Yield() { q.more = true }

// Push hands the chain with that head back to the driver. written is how many bytes of
// its writable part were filled, from the start.
func (q *Queue) Push(head uint16, written uint32) {
	if !q.ready {
		return
	}
	e := q.usedMem[ringHeader+usedElemLen*int(q.nextUsed&(q.size-1)):]
	binary.LittleEndian.PutUint32(e, uint32(head))
	binary.LittleEndian.PutUint32(e[4:], written)
	q.nextUsed++
	store16(q.usedMem, 2, q.nextUsed)
}

// wantsInterrupt tells whether the driver is to be interrupted for what was pushed
// since the last call.
func (q *Queue) wantsInterrupt() bool {
	if !q.ready || q.signalled == q.nextUsed {
		return false
	}
	// We push and look at the driver's wish, the driver wishes and looks at what we pushed.
	fence(&q.barrier)
	old := q.signalled
	q.signalled = q.nextUsed
	if q.eventIdx {
		event := load16(q.availMem, ringHeader+2*int(q.size))
		return q.nextUsed-event-1 < q.nextUsed-old
	}
	return load16(q.availMem, 0)&availNoIntr == 0
}

// walk fills c with the buffers of the chain that begins at head.
func (q *Queue) walk(c *Chain, head uint16) error {
	c.Head = head
	c.Readable, c.Writable, c.WritableAt = c.Readable[:0], c.Writable[:0], c.WritableAt[:0]
	c.ReadLen, c.WriteLen = 0, 0
	if head >= q.size {
		return fmt.Errorf("head %d of %d: %w", head, q.size, errHead)
	}
	table, limit := q.descMem, int(q.size)
	inTable := false
	for i, n := head, 0; ; n++ {
		if n >= limit {
			return fmt.Errorf("chain at %d: %w", head, errLoop)
		}
		d := readDescriptor(table, i)
		if d.flags&descIndirect != 0 {
			if !q.indirect || inTable || d.flags&descNext != 0 {
				return fmt.Errorf("chain at %d: %w", head, errIndirect)
			}
			var err error
			if table, err = q.table(d); err != nil {
				return fmt.Errorf("chain at %d: %w", head, err)
			}
			inTable, i, limit = true, 0, MaxChain
			continue
		}
		if err := c.add(q.mem, d); err != nil {
			return fmt.Errorf("chain at %d: descriptor at %#x+%d: %w", head, d.addr, d.len, err)
		}
		if d.flags&descNext == 0 {
			return nil
		}
		if int(d.next) >= len(table)/descLen {
			return fmt.Errorf("chain at %d: next is %d: %w", head, d.next, errNext)
		}
		i = d.next
	}
}

type descriptor struct {
	addr  uint64
	len   uint32
	flags uint16
	next  uint16
}

// readDescriptor copies descriptor i of a table that has it: the guest may change it at any time.
func readDescriptor(table []byte, i uint16) descriptor {
	b := table[descLen*int(i):]
	b = b[:descLen:descLen]
	le := binary.LittleEndian
	return descriptor{addr: le.Uint64(b), len: le.Uint32(b[8:]), flags: le.Uint16(b[12:]), next: le.Uint16(b[14:])}
}

// table returns the indirect table that d points at.
func (q *Queue) table(d descriptor) ([]byte, error) {
	if d.len == 0 || d.len%descLen != 0 || d.len > descLen*(1<<16) {
		return nil, fmt.Errorf("%d bytes: %w", d.len, errTable)
	}
	b, err := q.mem.Slice(d.addr, uint64(d.len))
	if err != nil {
		return nil, fmt.Errorf("%#x+%d: %w", d.addr, d.len, errTableMemory)
	}
	return b, nil
}

func (c *Chain) add(mem GuestMemory, d descriptor) error {
	if d.len == 0 {
		return errEmpty
	}
	b, err := mem.Slice(d.addr, uint64(d.len))
	if err != nil {
		return errAddress
	}
	if c.ReadLen+c.WriteLen+uint64(d.len) > maxChainBytes {
		return errLong
	}
	if d.flags&descWrite != 0 {
		c.Writable = append(c.Writable, b)
		c.WritableAt = append(c.WritableAt, d.addr)
		c.WriteLen += uint64(d.len)
		return nil
	}
	if len(c.Writable) > 0 {
		return errOrder
	}
	c.Readable = append(c.Readable, b)
	c.ReadLen += uint64(d.len)
	return nil
}

// enable maps the three areas as the driver set them.
func (q *Queue) enable() error {
	n := uint64(q.size)
	if n == 0 || n > uint64(q.limit) || n&(n-1) != 0 {
		return guestError(fmt.Sprintf("queue length %d is not a power of two up to %d", n, q.limit))
	}
	if q.desc%descLen != 0 || q.avail%2 != 0 || q.used%4 != 0 {
		return guestError(fmt.Sprintf("queue areas at %#x, %#x and %#x are not aligned to 16, 2 and 4", q.desc, q.avail, q.used))
	}
	for _, a := range []struct {
		name string
		at   uint64
		len  uint64
		mem  *[]byte
	}{
		{"descriptor table", q.desc, descLen * n, &q.descMem},
		// Both rings end with the event index of the other side.
		{"available ring", q.avail, ringHeader + 2*n + 2, &q.availMem},
		{"used ring", q.used, ringHeader + usedElemLen*n + 2, &q.usedMem},
	} {
		b, err := q.mem.Slice(a.at, a.len)
		if err != nil {
			return guestError(fmt.Sprintf("%s at %#x+%d is not inside of guest memory", a.name, a.at, a.len))
		}
		*a.mem = b
	}
	q.ready = true
	q.seenAvail = q.nextAvail
	return nil
}

// reset puts the queue back to what it is after a reset of the device.
func (q *Queue) reset() { *q = Queue{mem: q.mem, limit: q.limit, size: q.limit} }
