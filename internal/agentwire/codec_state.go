package agentwire

// Append appends the encoded message.
func (m *Identity) Append(dst []byte) []byte {
	e := encoder{dst}
	e.str(1, m.SandboxID)
	e.str(2, m.Hostname)
	e.str(3, m.MachineID)
	e.str(4, m.BootID)
	e.str(5, m.Token)
	e.bytes(6, m.Entropy)
	e.str(7, string(m.Reseed))
	e.stringMap(8, m.Env)
	e.stringMap(9, m.Secrets)
	e.uint(10, m.Generation)
	e.time(11, m.HostTime)
	e.flag(12, m.Keep)
	e.bytes(13, m.Fork)
	e.bytes(14, m.RunnerSeed)
	return e.b
}

// Decode reads what Append wrote.
func (m *Identity) Decode(b []byte) error {
	d := decoder{b: b}
	*m = Identity{}
	for d.next() {
		switch d.tag {
		case 1:
			m.SandboxID = d.str()
		case 2:
			m.Hostname = d.str()
		case 3:
			m.MachineID = d.str()
		case 4:
			m.BootID = d.str()
		case 5:
			m.Token = d.str()
		case 6:
			m.Entropy = d.bytes()
		case 7:
			m.Reseed = Reseed(d.str())
		case 8:
			m.Env = d.putPair(m.Env)
		case 9:
			m.Secrets = d.putPair(m.Secrets)
		case 10:
			m.Generation = d.uint()
		case 11:
			m.HostTime = d.time()
		case 12:
			m.Keep = d.flag()
		case 13:
			m.Fork = d.bytes()
		case 14:
			m.RunnerSeed = d.bytes()
		}
	}
	return d.err
}

// Append appends the encoded message.
func (m *ReceiptStep) Append(dst []byte) []byte {
	e := encoder{dst}
	e.str(1, m.Name)
	e.str(2, m.Status)
	e.str(3, m.Detail)
	return e.b
}

// Decode reads what Append wrote.
func (m *ReceiptStep) Decode(b []byte) error {
	d := decoder{b: b}
	*m = ReceiptStep{}
	for d.next() {
		switch d.tag {
		case 1:
			m.Name = d.str()
		case 2:
			m.Status = d.str()
		case 3:
			m.Detail = d.str()
		}
	}
	return d.err
}

// Append appends the encoded message.
func (m *Receipt) Append(dst []byte) []byte {
	e := encoder{dst}
	for i := range m.Steps {
		e.entry(1, m.Steps[i].Append(nil))
	}
	e.uint(2, m.Generation)
	e.int(3, int64(m.ClockOffset))
	e.int(4, int64(m.Duration))
	for _, s := range m.NotCovered {
		e.strEntry(5, s)
	}
	return e.b
}

// Decode reads what Append wrote.
func (m *Receipt) Decode(b []byte) error {
	d := decoder{b: b}
	*m = Receipt{}
	for d.next() {
		switch d.tag {
		case 1:
			var s ReceiptStep
			if !d.item() {
				break
			}
			if err := s.Decode(d.bytes()); err != nil {
				return err
			}
			m.Steps = append(m.Steps, s)
		case 2:
			m.Generation = d.uint()
		case 3:
			m.ClockOffset = d.duration()
		case 4:
			m.Duration = d.duration()
		case 5:
			m.NotCovered = d.appendStr(m.NotCovered)
		}
	}
	return d.err
}

// Append appends the encoded message.
func (m *Pong) Append(dst []byte) []byte {
	e := encoder{dst}
	e.str(1, m.AgentVersion)
	e.int(2, int64(m.ProtocolVersion))
	e.int(3, int64(m.PID))
	e.time(4, m.WallClock)
	e.int(5, int64(m.Uptime))
	e.flag(6, m.WarmupReady)
	for _, r := range m.Runners {
		e.strEntry(7, r)
	}
	e.str(8, m.PythonVersion)
	e.str(9, m.NumpyVersion)
	e.uint(10, m.Generation)
	e.int(11, int64(m.Threads))
	e.int(12, int64(m.Children))
	return e.b
}

// Decode reads what Append wrote.
func (m *Pong) Decode(b []byte) error {
	d := decoder{b: b}
	*m = Pong{}
	for d.next() {
		switch d.tag {
		case 1:
			m.AgentVersion = d.str()
		case 2:
			m.ProtocolVersion = d.small()
		case 3:
			m.PID = d.small()
		case 4:
			m.WallClock = d.time()
		case 5:
			m.Uptime = d.duration()
		case 6:
			m.WarmupReady = d.flag()
		case 7:
			m.Runners = d.appendStr(m.Runners)
		case 8:
			m.PythonVersion = d.str()
		case 9:
			m.NumpyVersion = d.str()
		case 10:
			m.Generation = d.uint()
		case 11:
			m.Threads = d.small()
		case 12:
			m.Children = d.small()
		}
	}
	return d.err
}

// Append appends the encoded message.
func (m *BootConfig) Append(dst []byte) []byte {
	e := encoder{dst}
	e.str(1, m.Hostname)
	e.time(2, m.HostTime)
	e.stringMap(3, m.Env)
	e.bytes(4, m.Entropy)
	return e.b
}

// Decode reads what Append wrote.
func (m *BootConfig) Decode(b []byte) error {
	d := decoder{b: b}
	*m = BootConfig{}
	for d.next() {
		switch d.tag {
		case 1:
			m.Hostname = d.str()
		case 2:
			m.HostTime = d.time()
		case 3:
			m.Env = d.putPair(m.Env)
		case 4:
			m.Entropy = d.bytes()
		}
	}
	return d.err
}
