package agentwire

import "forkd.dev/forkd/internal/errdefs"

// Append appends the encoded message, as do all methods of that name here.
func (m *Hello) Append(dst []byte) []byte {
	e := encoder{dst}
	e.bytes(1, m.Nonce[:])
	e.int(2, int64(m.Version))
	return e.b
}

// Decode reads what Append wrote, as do all methods of that name here: unknown
// fields are skipped, anything malformed is an error of class ErrCorrupt, and
// byte slices are parts of b.
func (m *Hello) Decode(b []byte) error {
	d := decoder{b: b}
	*m = Hello{}
	found := false
	for d.next() {
		switch d.tag {
		case 1:
			found = copy(m.Nonce[:], d.bytes()) == len(m.Nonce)
		case 2:
			m.Version = d.small()
		}
	}
	if d.err == nil && !found {
		return errdefs.New(errdefs.ErrCorrupt, "hello without a nonce of 16 bytes")
	}
	return d.err
}

// Append appends the encoded message.
func (m *HelloAck) Append(dst []byte) []byte {
	e := encoder{(&Hello{Nonce: m.Nonce, Version: m.Version}).Append(dst)}
	e.str(3, m.AgentVersion)
	return e.b
}

// Decode reads what Append wrote.
func (m *HelloAck) Decode(b []byte) error {
	var h Hello
	if err := h.Decode(b); err != nil {
		return err
	}
	*m = HelloAck{Nonce: h.Nonce, Version: h.Version}
	d := decoder{b: b}
	for d.next() {
		if d.tag == 3 {
			m.AgentVersion = printable(d.str())
		}
	}
	return d.err
}

// Append appends the encoded message.
func (m *WarmStart) Append(dst []byte) []byte {
	e := encoder{dst}
	e.str(1, m.Language)
	e.str(2, m.Code)
	e.int(3, int64(m.Timeout))
	return e.b
}

// Decode reads what Append wrote.
func (m *WarmStart) Decode(b []byte) error {
	d := decoder{b: b}
	*m = WarmStart{}
	for d.next() {
		switch d.tag {
		case 1:
			m.Language = d.str()
		case 2:
			m.Code = d.str()
		case 3:
			m.Timeout = d.duration()
		}
	}
	return d.err
}

// Append appends the encoded message.
func (m *Prepare) Append(dst []byte) []byte {
	e := encoder{dst}
	e.flag(1, m.Sync)
	e.flag(2, m.Settle)
	e.flag(3, m.Known)
	return e.b
}

// Decode reads what Append wrote.
func (m *Prepare) Decode(b []byte) error {
	d := decoder{b: b}
	*m = Prepare{}
	for d.next() {
		switch d.tag {
		case 1:
			m.Sync = d.flag()
		case 2:
			m.Settle = d.flag()
		case 3:
			m.Known = d.flag()
		}
	}
	return d.err
}

// Append appends the encoded message.
func (m *Clock) Append(dst []byte) []byte {
	e := encoder{dst}
	e.time(1, m.Wall)
	return e.b
}

// Decode reads what Append wrote.
func (m *Clock) Decode(b []byte) error {
	d := decoder{b: b}
	*m = Clock{}
	for d.next() {
		if d.tag == 1 {
			m.Wall = d.time()
		}
	}
	return d.err
}

// Append appends the encoded message.
func (e *CallError) Append(dst []byte) []byte {
	enc := encoder{dst}
	enc.str(1, e.Code)
	enc.str(2, e.Message)
	enc.str(3, e.Hint)
	return enc.b
}

// Decode reads what Append wrote.
func (e *CallError) Decode(b []byte) error {
	d := decoder{b: b}
	*e = CallError{}
	for d.next() {
		switch d.tag {
		case 1:
			e.Code = d.str()
		case 2:
			e.Message = d.str()
		case 3:
			e.Hint = d.str()
		}
	}
	return d.err
}
