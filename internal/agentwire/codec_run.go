package agentwire

import "encoding/binary"

// The fields of ExecResult and EvalResult that hold output.
const (
	tagStdout = 3 // of ExecResult
	tagStderr = 4
	// EvalResult has the same two behind its result.
	tagEvalStdout = 4
	tagEvalStderr = 5
)

// Parts encodes m with output given as pieces instead of its Stdout and Stderr,
// for a body that is the concatenation of the parts: large output is never copied.
func (m *ExecResult) Parts(stdout, stderr [][]byte) [][]byte {
	head := *m
	head.Stdout, head.Stderr = nil, nil
	return appendOutput(appendOutput([][]byte{head.Append(nil)}, tagStdout, stdout), tagStderr, stderr)
}

// Parts is as ExecResult.Parts.
func (m *EvalResult) Parts(stdout, stderr [][]byte) [][]byte {
	head := *m
	head.Stdout, head.Stderr = nil, nil
	return appendOutput(appendOutput([][]byte{head.Append(nil)}, tagEvalStdout, stdout), tagEvalStderr, stderr)
}

func appendOutput(parts [][]byte, tag uint64, pieces [][]byte) [][]byte {
	size := 0
	for _, p := range pieces {
		size += len(p)
	}
	if size == 0 {
		return parts
	}
	key := binary.AppendUvarint(nil, tag<<1|1)
	return append(append(parts, binary.AppendUvarint(key, uint64(size))), pieces...)
}

// Append appends the encoded message.
func (m *ExecRequest) Append(dst []byte) []byte {
	e := encoder{dst}
	for _, a := range m.Argv {
		e.strEntry(1, a)
	}
	e.stringMap(2, m.Env)
	e.str(3, m.Cwd)
	e.str(4, m.User)
	e.bytes(5, m.Stdin)
	e.int(6, int64(m.Timeout))
	e.int(7, int64(m.OutputLimit))
	return e.b
}

// Decode reads what Append wrote.
func (m *ExecRequest) Decode(b []byte) error {
	d := decoder{b: b}
	*m = ExecRequest{}
	for d.next() {
		switch d.tag {
		case 1:
			m.Argv = d.appendStr(m.Argv)
		case 2:
			m.Env = d.putPair(m.Env)
		case 3:
			m.Cwd = d.str()
		case 4:
			m.User = d.str()
		case 5:
			m.Stdin = d.bytes()
		case 6:
			m.Timeout = d.duration()
		case 7:
			m.OutputLimit = d.signed()
		}
	}
	return d.err
}

// Append appends the encoded message.
func (m *ExecResult) Append(dst []byte) []byte {
	e := encoder{dst}
	e.int(1, int64(m.ExitCode))
	e.int(2, int64(m.Signal))
	e.bytes(3, m.Stdout)
	e.bytes(4, m.Stderr)
	e.flag(5, m.StdoutTruncated)
	e.flag(6, m.StderrTruncated)
	e.flag(7, m.TimedOut)
	e.flag(8, m.OOMKilled)
	e.int(9, int64(m.Duration))
	e.int(10, int64(m.CPU))
	e.int(11, m.MaxRSSKiB)
	return e.b
}

// Decode reads what Append wrote.
func (m *ExecResult) Decode(b []byte) error {
	d := decoder{b: b}
	*m = ExecResult{}
	for d.next() {
		switch d.tag {
		case 1:
			m.ExitCode = d.signed()
		case 2:
			m.Signal = d.small()
		case 3:
			m.Stdout = d.bytes()
		case 4:
			m.Stderr = d.bytes()
		case 5:
			m.StdoutTruncated = d.flag()
		case 6:
			m.StderrTruncated = d.flag()
		case 7:
			m.TimedOut = d.flag()
		case 8:
			m.OOMKilled = d.flag()
		case 9:
			m.Duration = d.duration()
		case 10:
			m.CPU = d.duration()
		case 11:
			m.MaxRSSKiB = d.int()
		}
	}
	return d.err
}

// Append appends the encoded message.
func (m *EvalRequest) Append(dst []byte) []byte {
	e := encoder{dst}
	e.str(1, m.Language)
	e.str(2, m.Code)
	e.int(3, int64(m.Timeout))
	e.int(4, int64(m.OutputLimit))
	return e.b
}

// Decode reads what Append wrote.
func (m *EvalRequest) Decode(b []byte) error {
	d := decoder{b: b}
	*m = EvalRequest{}
	for d.next() {
		switch d.tag {
		case 1:
			m.Language = d.str()
		case 2:
			m.Code = d.str()
		case 3:
			m.Timeout = d.duration()
		case 4:
			m.OutputLimit = d.signed()
		}
	}
	return d.err
}

// Append appends the encoded message.
func (m *EvalResult) Append(dst []byte) []byte {
	e := encoder{dst}
	e.flag(1, m.HasResult)
	e.str(2, m.Result)
	e.flag(3, m.ResultTruncated)
	e.bytes(4, m.Stdout)
	e.bytes(5, m.Stderr)
	e.flag(6, m.StdoutTruncated)
	e.flag(7, m.StderrTruncated)
	e.str(8, m.Error)
	e.str(9, m.Traceback)
	e.flag(10, m.TimedOut)
	e.flag(11, m.RunnerRestarted)
	e.int(12, int64(m.Duration))
	return e.b
}

// Decode reads what Append wrote.
func (m *EvalResult) Decode(b []byte) error {
	d := decoder{b: b}
	*m = EvalResult{}
	for d.next() {
		switch d.tag {
		case 1:
			m.HasResult = d.flag()
		case 2:
			m.Result = d.str()
		case 3:
			m.ResultTruncated = d.flag()
		case 4:
			m.Stdout = d.bytes()
		case 5:
			m.Stderr = d.bytes()
		case 6:
			m.StdoutTruncated = d.flag()
		case 7:
			m.StderrTruncated = d.flag()
		case 8:
			m.Error = d.str()
		case 9:
			m.Traceback = d.str()
		case 10:
			m.TimedOut = d.flag()
		case 11:
			m.RunnerRestarted = d.flag()
		case 12:
			m.Duration = d.duration()
		}
	}
	return d.err
}
