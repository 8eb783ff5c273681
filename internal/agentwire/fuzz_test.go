package agentwire

import (
	"bytes"
	"errors"
	"testing"
)

// FuzzReader reads any bytes as frames: no panic, bounded memory, and what is
// read is written the same way again.
func FuzzReader(f *testing.F) {
	for _, g := range goldenFrames() {
		f.Add(AppendFrame(nil, g.t, g.id, g.payload))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		r := NewReader(bytes.NewReader(bytes.Clone(b)))
		for {
			fr, err := r.Next()
			var damaged *DamagedError
			if errors.As(err, &damaged) {
				continue
			}
			if err != nil {
				return
			}
			again, err := NewReader(bytes.NewReader(AppendFrame(nil, fr.Type, fr.ID, fr.Payload))).Next()
			if err != nil || again.Type != fr.Type || again.ID != fr.ID || !bytes.Equal(again.Payload, fr.Payload) {
				t.Fatalf("%+v came back as %+v, %v", fr, again, err)
			}
		}
	})
}

// FuzzFrame writes any payload and reads it back.
func FuzzFrame(f *testing.F) {
	f.Add(byte(1), uint32(7), []byte("\x00\x00a"))
	f.Add(byte(9), uint32(0), bytes.Repeat([]byte{1}, 254))
	f.Fuzz(func(t *testing.T, typ byte, id uint32, payload []byte) {
		if len(payload) > MaxPayload {
			return
		}
		b := AppendFrame(nil, FrameType(typ), id, payload)
		if i := bytes.IndexByte(b, Mark); i != len(b)-1 {
			t.Fatalf("mark at %d of %d", i, len(b))
		}
		fr, err := NewReader(bytes.NewReader(b)).Next()
		if err != nil || fr.Type != FrameType(typ) || fr.ID != id || !bytes.Equal(fr.Payload, payload) {
			t.Fatalf("%+v, %v", fr, err)
		}
	})
}

// FuzzMessages decodes any bytes as each message: no panic, and what is decoded
// comes back from its own encoding.
func FuzzMessages(f *testing.F) {
	for _, g := range goldenFrames() {
		if messages()[g.name] != nil {
			f.Add(g.body())
		}
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		for name, make := range messages() {
			m := make()
			if m.Decode(b) != nil {
				continue
			}
			again := make()
			if err := again.Decode(m.Append(nil)); err != nil {
				t.Fatalf("%s %+v: %v", name, m, err)
			}
		}
	})
}

// FuzzInspect reads any bytes as parts and any part as each of its messages.
func FuzzInspect(f *testing.F) {
	var b bytes.Buffer
	file := FileEntry{Path: "/etc/passwd", Mode: 0o100644, Size: 7, MTime: -1, CTime: 2, Inode: 3, UID: 4, GID: 5, Target: "t"}
	process := ProcessEntry{PID: 1, Name: "init", Command: "/sbin/init", RSSKiB: 9}
	request := InspectRequest{Op: InspectDigest, Path: "/x", Limit: 5}
	for kind, body := range map[Part][]byte{PartFile: file.Append(nil), PartProcess: process.Append(nil), PartData: request.Append(nil)} {
		if err := WritePart(&b, kind, body); err != nil {
			f.Fatal(err)
		}
	}
	f.Add(b.Bytes())
	f.Fuzz(func(t *testing.T, b []byte) {
		r := bytes.NewReader(b)
		var buf []byte
		for {
			_, body, grown, err := ReadPart(r, buf)
			if err != nil {
				return
			}
			buf = grown
			var m FileEntry
			if m.Decode(body) == nil {
				var again FileEntry
				if err := again.Decode(m.Append(nil)); err != nil || again != m {
					t.Fatalf("%+v came back as %+v, %v", m, again, err)
				}
			}
			_, _ = new(ProcessEntry).Decode(body), new(InspectRequest).Decode(body)
			_ = new(MemoryTotals).Decode(body)
		}
	})
}
