package virtiotest

// OpSize is how many bytes of a program make one operation of [Driver.RunHostile].
const OpSize = 8

// RunHostile interprets bytes of a fuzzer as things a hostile guest does to a device: any register at
// any time, descriptors with any content, rings with any index, requests with content of the fuzzer's
// choice, doorbells. between is called now and then, at the fuzzer's choice too, with a number.
//
// What the device makes of it is checked by the caller: no panic, and memory, CPU and host
// effects within bounds.
func (d *Driver) RunHostile(program []byte, between func(n byte)) {
	for ; len(program) >= OpSize; program = program[OpSize:] {
		d.hostileOp(program[0], program[1], program[2], program[3], le.Uint32(program[4:]), between)
	}
}

func (d *Driver) hostileOp(op, a, b, c byte, v uint32, between func(byte)) {
	switch op % 12 {
	case 0:
		d.SetReg(uint64(a)*4, v)
	case 1:
		d.T.Write(RegConfig+uint64(a), []byte{b, c, byte(v), byte(v >> 8)}[:1+c%4])
	case 2:
		d.T.Read(uint64(a)|uint64(b)<<8, make([]byte, 1+c%8))
	case 11:
		between(a)
	}
	if len(d.Queues) == 0 {
		return
	}
	q := d.Queues[int(a)%len(d.Queues)]
	switch op % 12 {
	case 3, 4:
		q.Descriptor(q.DescAt, uint16(b)%q.Size, Buffer{d.HostileAddr(v), uint64(hostileLen(c, v))}, uint16(v>>29)^uint16(op>>4&3), uint16(v>>5))
	case 5:
		d.hostileRequest(q, b, c, v)
	case 6:
		q.Offer(uint16(v))
		q.Kick()
	case 7:
		q.NextAvail += uint16(v)
		q.Show()
		d.SetReg(RegQueueNotify, uint32(a))
	case 8:
		at := d.HostileAddr(v)
		if m, err := d.Mem.Slice(at, 4); err == nil {
			copy(m, []byte{a, b, c, byte(v)})
		}
	case 9:
		q.Poll()
	case 10:
		d.SetReg(RegQueueNotify, uint32(a)%uint32(len(d.Queues)+1))
	}
}

// hostileRequest is a well-formed request whose readable part begins with bytes of the fuzzer's choice.
func (d *Driver) hostileRequest(q *Queue, b, c byte, v uint32) {
	out := d.Bytes(hostileArea, 64)
	for i := range 4 {
		out[(int(b)+i)%64] = byte(v >> (8 * i))
	}
	r := Request{Indirect: c&1 != 0}
	if c&2 != 0 {
		r.Indirect = false
		r.Out = append(r.Out, Buffer{hostileArea, 1 + uint64(b)%64})
	} else {
		r.Out = append(r.Out, Buffer{hostileArea, 16})
	}
	for range c >> 2 & 3 {
		r.In = append(r.In, Buffer{hostileArea + 4096, 1 + uint64(v)%8192})
	}
	r.In = append(r.In, Buffer{hostileArea + 64, 1})
	mark := d.Mark()
	if _, ok := q.Add(r); ok {
		q.Kick()
	}
	d.Release(mark)
}

// hostileArea is low memory that Init's rings do not reach.
const hostileArea = 256 << 10

// HostileAddr turns a number into an address, often one at an edge.
func (d *Driver) HostileAddr(v uint32) uint64 {
	low := uint64(len(d.Mem.Low))
	off := uint64(v >> 3 & 0xfff)
	switch v & 7 {
	case 0:
		return low - off
	case 1:
		return HighBase + uint64(len(d.Mem.High)) - off
	case 2:
		return HighBase + off
	case 3:
		return -off // the end of all addresses
	case 4:
		return 4096 + off // rings
	case 5:
		return 1<<63 | off
	}
	return uint64(v>>3) % low
}

func hostileLen(c byte, v uint32) uint32 {
	switch c & 3 {
	case 0:
		return uint32(c >> 2)
	case 1:
		return 512 << (c >> 2 & 7)
	case 2:
		return ^uint32(0) - uint32(c>>2)
	}
	return v & 0xffff
}
