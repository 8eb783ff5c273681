package virtiotest

import (
	"sync/atomic"

	"forkd.dev/forkd/internal/vmm/virtio"
)

// Queue is the driver's side of a split virtqueue.
type Queue struct {
	Index                      int
	Size                       uint16
	DescAt, AvailAt, UsedAt    uint64
	NextAvail, LastUsed, Shown uint16 // Shown: the index that the device can see

	d      *Driver
	free   []uint16
	chains map[uint16][]uint16 // descriptors by head
	kicked uint16              // Shown when the driver last considered a notification

	barrier atomic.Uint32
}

// Buffer is guest memory that is part of a request.
type Buffer struct{ Addr, Len uint64 }

// Request is a chain: the device reads Out and fills In.
type Request struct {
	Out, In  []Buffer
	Indirect bool
}

// Used is a request that the device has done with.
type Used struct {
	Head uint16
	Len  uint32
}

func (d *Driver) newQueue(i int, size uint16) *Queue {
	n := uint64(size)
	q := &Queue{Index: i, Size: size, d: d, chains: make(map[uint16][]uint16),
		DescAt: d.Alloc(16*n, 16), AvailAt: d.Alloc(6+2*n, 2), UsedAt: d.Alloc(6+8*n, 4)}
	clear(d.Bytes(q.DescAt, 16*n))
	clear(d.Bytes(q.AvailAt, 6+2*n))
	clear(d.Bytes(q.UsedAt, 6+8*n))
	for j := range size {
		q.free = append(q.free, size-1-j)
	}
	q.Enable()
	return q
}

// Enable tells the device where the queue is and makes it ready.
func (q *Queue) Enable() {
	d := q.d
	d.SetReg(RegQueueSel, uint32(q.Index))
	d.SetReg(RegQueueNum, uint32(q.Size))
	for _, r := range []struct{ reg, at uint64 }{{RegQueueDesc, q.DescAt}, {RegQueueDriver, q.AvailAt}, {RegQueueDevice, q.UsedAt}} {
		d.SetReg(r.reg, uint32(r.at))
		d.SetReg(r.reg+4, uint32(r.at>>32))
	}
	d.SetReg(RegQueueReady, 1)
}

// Restart forgets all requests and begins anew, after the device was told to reset the queue.
func (q *Queue) Restart() {
	q.NextAvail, q.LastUsed, q.Shown, q.kicked = 0, 0, 0, 0
	q.free, q.chains = nil, make(map[uint16][]uint16)
	for j := range q.Size {
		q.free = append(q.free, q.Size-1-j)
	}
	clear(q.d.Bytes(q.AvailAt, 6+2*uint64(q.Size)))
	clear(q.d.Bytes(q.UsedAt, 6+8*uint64(q.Size)))
	q.Enable()
}

// Free counts descriptors that are not in use.
func (q *Queue) Free() int { return len(q.free) }

// Outstanding counts requests that the device has not given back.
func (q *Queue) Outstanding() int { return len(q.chains) }

// Descriptor writes descriptor i of the table at addr.
func (q *Queue) Descriptor(table uint64, i uint16, b Buffer, flags, next uint16) {
	p := q.d.Bytes(table+16*uint64(i), 16)
	le.PutUint64(p, b.Addr)
	le.PutUint32(p[8:], uint32(b.Len))
	le.PutUint16(p[12:], flags)
	le.PutUint16(p[14:], next)
}

// Add puts a request into the ring without showing it to the device. It returns false
// if there are too few descriptors. An indirect table is allocated with Alloc.
func (q *Queue) Add(r Request) (head uint16, ok bool) {
	n := len(r.Out) + len(r.In)
	if r.Indirect {
		if len(q.free) < 1 {
			return 0, false
		}
		at := q.d.Alloc(16*uint64(n), 16)
		for i := range n {
			q.writeOne(r, i, at, uint16(i), uint16(i+1))
		}
		head = q.take()
		q.Descriptor(q.DescAt, head, Buffer{at, 16 * uint64(n)}, 4, 0)
		q.chains[head] = []uint16{head}
		q.Offer(head)
		return head, true
	}
	if len(q.free) < n {
		return 0, false
	}
	list := make([]uint16, n)
	for i := range list {
		list[i] = q.take()
	}
	for i := range list {
		next := uint16(0)
		if i+1 < n {
			next = list[i+1]
		}
		q.writeOne(r, i, q.DescAt, list[i], next)
	}
	q.chains[list[0]] = list
	q.Offer(list[0])
	return list[0], true
}

func (q *Queue) writeOne(r Request, i int, table uint64, at, next uint16) {
	var flags uint16
	var b Buffer
	if i < len(r.Out) {
		b = r.Out[i]
	} else {
		b, flags = r.In[i-len(r.Out)], 2
	}
	if i+1 < len(r.Out)+len(r.In) {
		flags |= 1
	}
	q.Descriptor(table, at, b, flags, next)
}

func (q *Queue) take() uint16 {
	h := q.free[len(q.free)-1]
	q.free = q.free[:len(q.free)-1]
	return h
}

// Offer puts any head into the ring.
func (q *Queue) Offer(head uint16) {
	le.PutUint16(q.d.Bytes(q.AvailAt+4+2*uint64(q.NextAvail%q.Size), 2), head)
	q.NextAvail++
}

// Show makes all that was added visible to the device.
func (q *Queue) Show() {
	q.Shown = q.NextAvail
	le.PutUint16(q.d.Bytes(q.AvailAt+2, 2), q.Shown)
}

// Kick shows what was added and notifies the device if it wants that.
func (q *Queue) Kick() {
	old := q.kicked
	q.Show()
	q.kicked = q.Shown
	q.barrier.Add(1) // our index before the device's wish
	if q.wanted(old) {
		q.d.Notified++
		if !q.d.Mute {
			q.d.SetReg(RegQueueNotify, uint32(q.Index))
		}
	}
}

func (q *Queue) wanted(old uint16) bool {
	if q.d.Features&virtio.FeatureEventIdx != 0 {
		event := le.Uint16(q.d.Bytes(q.UsedAt+4+8*uint64(q.Size), 2))
		return q.Shown-event-1 < q.Shown-old
	}
	return le.Uint16(q.d.Bytes(q.UsedAt, 2))&1 == 0
}

// Poll returns the next request that the device has done with, and asks for an
// interrupt for the one after.
func (q *Queue) Poll() (Used, bool) {
	idx := le.Uint16(q.d.Bytes(q.UsedAt+2, 2))
	if idx == q.LastUsed {
		return Used{}, false
	}
	e := q.d.Bytes(q.UsedAt+4+8*uint64(q.LastUsed%q.Size), 8)
	u := Used{Head: uint16(le.Uint32(e)), Len: le.Uint32(e[4:])}
	q.LastUsed++
	q.WantInterrupt(q.LastUsed)
	q.free = append(q.free, q.chains[u.Head]...)
	delete(q.chains, u.Head)
	return u, true
}

// WantInterrupt asks for an interrupt when the device uses entry at.
func (q *Queue) WantInterrupt(at uint16) {
	le.PutUint16(q.d.Bytes(q.AvailAt+4+2*uint64(q.Size), 2), at)
	q.barrier.Add(1) // our wish before the device's index
}
