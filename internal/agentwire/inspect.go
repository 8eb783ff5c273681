package agentwire

import (
	"encoding/binary"
	"fmt"
	"io"
	"strings"

	"forkd.dev/forkd/internal/errdefs"
)

// StreamInspect answers questions about a guest from outside of it: what files it has,
// what is in them, what runs. The host sends requests, each answered by parts up to a
// PartEnd or PartError, before it sends the next. The agent answers also while user
// processes are frozen, and changes nothing.
const StreamInspect = "inspect"

// InspectOp is what a request on an inspect stream asks for.
type InspectOp uint8

// The operations, with the parts they give.
const (
	InspectWalk      InspectOp = iota + 1 // PartFile for each file below Path, on its file system
	InspectDigest                         // PartData, SHA-256 of the file Path
	InspectContent                        // PartData, pieces of the file Path, at most Limit bytes
	InspectProcesses                      // PartProcess for each, PartMemory
)

// InspectRequest is one question.
type InspectRequest struct {
	Op    InspectOp
	Path  string // absolute
	Limit int64  // of the bytes of a file; more is ErrResourceExhausted
}

// Part is the kind of a piece of an answer.
type Part uint8

// The parts.
const (
	PartFile    Part = iota + 1 // FileEntry
	PartProcess                 // ProcessEntry
	PartMemory                  // MemoryTotals
	PartData                    // bytes
	PartEnd                     // the answer is complete
	PartError                   // CallError; the next request can follow
)

// Limits of an inspect stream.
const (
	MaxInspectPart  = 64 << 10
	MaxInspectFiles = 1_000_000
	MaxInspectPath  = 4096
)

// FileEntry describes a file as lstat does.
type FileEntry struct {
	Path         string
	Mode         uint32 // type and permission bits of st_mode
	Size         int64
	MTime, CTime int64 // nanoseconds since 1970
	Inode        uint64
	UID, GID     uint32
	Target       string // of a symbolic link
}

// ProcessEntry is one process of the guest.
type ProcessEntry struct {
	PID, Parent int
	Name        string
	Command     string // arguments joined by spaces; "" for a thread of the kernel
	RSSKiB      int64
}

// MemoryTotals is how much memory the guest has and can still give.
type MemoryTotals struct{ TotalKiB, AvailableKiB int64 }

// WritePart writes one part.
func WritePart(w io.Writer, kind Part, body []byte) error {
	if len(body) >= MaxInspectPart {
		return errdefs.New(errdefs.ErrInvalid, "part of %d bytes", len(body))
	}
	head := binary.LittleEndian.AppendUint32(make([]byte, 0, 5), uint32(len(body)))
	if _, err := w.Write(append(head, byte(kind))); err != nil || len(body) == 0 {
		return err
	}
	_, err := w.Write(body)
	return err
}

// ReadPart reads what WritePart wrote. The body is valid until the next call with the
// same buf, which grows as needed.
func ReadPart(r io.Reader, buf []byte) (kind Part, body, grown []byte, err error) {
	var head [5]byte
	if _, err := io.ReadFull(r, head[:]); err != nil {
		return 0, nil, buf, fmt.Errorf("read part: %w", err)
	}
	n := binary.LittleEndian.Uint32(head[:])
	if n >= MaxInspectPart {
		return 0, nil, buf, errdefs.New(errdefs.ErrCorrupt, "read part: it has %d bytes, more than %d", n, MaxInspectPart)
	}
	if int(n) > cap(buf) {
		buf = make([]byte, MaxInspectPart)
	}
	if _, err := io.ReadFull(r, buf[:n]); err != nil {
		return 0, nil, buf, fmt.Errorf("read part: %w", err)
	}
	return Part(head[4]), buf[:n:n], buf, nil
}

// Append appends the encoded message.
func (m *InspectRequest) Append(dst []byte) []byte {
	e := encoder{dst}
	e.uint(1, uint64(m.Op))
	e.str(2, m.Path)
	e.int(3, m.Limit)
	return e.b
}

// Decode reads what Append wrote.
func (m *InspectRequest) Decode(b []byte) error {
	d := decoder{b: b}
	*m = InspectRequest{}
	for d.next() {
		switch d.tag {
		case 1:
			m.Op = InspectOp(min(d.uint(), 255))
		case 2:
			m.Path = d.str()
		case 3:
			m.Limit = d.int()
		}
	}
	if d.err == nil && (m.Path != "" && m.Path[0] != '/' || len(m.Path) > MaxInspectPath || strings.Contains(m.Path, "\x00")) {
		d.fail("path %.80q", m.Path)
	}
	return d.err
}

// Append appends the encoded message.
func (m *FileEntry) Append(dst []byte) []byte {
	e := encoder{dst}
	e.str(1, m.Path)
	e.uint(2, uint64(m.Mode))
	e.int(3, m.Size)
	e.int(4, m.MTime)
	e.int(5, m.CTime)
	e.uint(6, m.Inode)
	e.uint(7, uint64(m.UID))
	e.uint(8, uint64(m.GID))
	e.str(9, m.Target)
	return e.b
}

// Decode reads what Append wrote and refuses what no file system has.
func (m *FileEntry) Decode(b []byte) error {
	d := decoder{b: b}
	*m = FileEntry{}
	for d.next() {
		switch d.tag {
		case 1:
			m.Path = d.str()
		case 2:
			m.Mode = d.word()
		case 3:
			m.Size = d.int()
		case 4:
			m.MTime = d.int()
		case 5:
			m.CTime = d.int()
		case 6:
			m.Inode = d.uint()
		case 7:
			m.UID = d.word()
		case 8:
			m.GID = d.word()
		case 9:
			m.Target = d.str()
		}
	}
	if d.err == nil && (m.Path == "" || m.Path[0] != '/' || len(m.Path) > MaxInspectPath || len(m.Target) > MaxInspectPath ||
		strings.Contains(m.Path, "\x00") || m.Size < 0) {
		d.fail("file %.80q of %d bytes", m.Path, m.Size)
	}
	return d.err
}

// word returns a number of 32 bits.
func (d *decoder) word() uint32 {
	v := d.uint()
	if v > 1<<32-1 {
		d.fail("field %d out of range", d.tag)
		return 0
	}
	return uint32(v)
}

// Append appends the encoded message.
func (m *ProcessEntry) Append(dst []byte) []byte {
	e := encoder{dst}
	e.int(1, int64(m.PID))
	e.int(2, int64(m.Parent))
	e.str(3, m.Name)
	e.str(4, m.Command)
	e.int(5, m.RSSKiB)
	return e.b
}

// Decode reads what Append wrote.
func (m *ProcessEntry) Decode(b []byte) error {
	d := decoder{b: b}
	*m = ProcessEntry{}
	for d.next() {
		switch d.tag {
		case 1:
			m.PID = d.small()
		case 2:
			m.Parent = d.small()
		case 3:
			m.Name = printable(d.str())
		case 4:
			m.Command = printable(d.str())
		case 5:
			m.RSSKiB = d.int()
		}
	}
	return d.err
}

// Append appends the encoded message.
func (m *MemoryTotals) Append(dst []byte) []byte {
	e := encoder{dst}
	e.int(1, m.TotalKiB)
	e.int(2, m.AvailableKiB)
	return e.b
}

// Decode reads what Append wrote.
func (m *MemoryTotals) Decode(b []byte) error {
	d := decoder{b: b}
	*m = MemoryTotals{}
	for d.next() {
		switch d.tag {
		case 1:
			m.TotalKiB = d.int()
		case 2:
			m.AvailableKiB = d.int()
		}
	}
	return d.err
}
