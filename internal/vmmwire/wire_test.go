package vmmwire

import (
	"errors"
	"reflect"
	"testing"
	"time"

	"forkd.dev/forkd/internal/errdefs"
)

func samples() []Message {
	memory := Memory{Ranges: []Range{{Page: 0, Count: 16384, File: 0, Offset: 4096}, {Page: 20000, Count: 8, File: NoFile}, {Page: 20008, Count: 1, File: 2, Offset: 1 << 40}}}
	devices := []Device{{Kind: DeviceSerial, Files: []int{3}}, {Kind: DeviceBlock, Files: []int{0, 1}, Args: []byte("ro")}, {Kind: DeviceRNG}}
	shape := Shape{CPUs: 2, MemoryMiB: 512}
	return []Message{
		&Hello{Version: Version, Build: "b", State: StatePaused, PID: 77, ID: "sbx", Lost: []string{"own uid", ""}},
		&Boot{ID: "sb1", Shape: shape, Kernel: 0, Initrd: NoFile, Cmdline: "console=ttyS0", Devices: devices, Paused: true, LowestCPU: true},
		&Restore{ID: "sb1", Shape: shape, Memory: memory, State: 3, Devices: devices, Run: true, Generation: [16]byte{1, 2}},
		&Rollback{Memory: memory, State: 1, Run: true, ToLast: true, Generation: [16]byte{9}},
		&CaptureBegin{Pages: 0, Index: 1, MaxPages: 1000, Everything: true, NoCopy: true},
		&CaptureEnd{State: 0, Run: true, Devices: []Device{{Kind: DeviceBlock, Files: []int{1}}}},
		&Captured{Pages: 1, Runs: 2, CopiedPages: 3, Rounds: 4, Pause: time.Millisecond, StateBytes: 5},
		&Stats{State: StateRunning, Exits: 9, PrivatePages: 8, CPU: time.Second, Waiting: "space"},
		&Failed{Code: "conflict", Text: "no"}, &Ended{Reason: "triple fault", Guest: true},
		&Simple{KindPause}, &Simple{KindResume}, &Simple{KindCaptureAbort}, &Simple{KindStored}, &Simple{KindStats}, &Simple{KindQuit}, &Simple{KindDone},
	}
}

func TestRoundTrip(t *testing.T) {
	seen := map[Kind]bool{}
	for i, m := range samples() {
		seen[m.Kind()] = true
		b, err := Encode(uint32(i), m)
		if err != nil {
			t.Fatal(err)
		}
		seq, got, err := Decode(b, 4)
		if err != nil || seq != uint32(i) || !reflect.DeepEqual(got, m) {
			t.Errorf("%T: got %+v, %v; want %+v", m, got, err, m)
		}
		if _, _, err := Decode(append(b, 0x7e, 1), 4); err != nil { // an unknown number field
			t.Errorf("%T with an unknown field: %v", m, err)
		}
	}
	for k := KindHello; k < kindEnd; k++ {
		if !seen[k] {
			t.Errorf("no sample of kind %d", k)
		}
	}
}

func TestDecodeRefuses(t *testing.T) {
	shape := Shape{CPUs: 1, MemoryMiB: 1}
	many := Memory{}
	for i := range uint64(MaxRanges + 1) {
		many.Ranges = append(many.Ranges, Range{Page: 2 * i, Count: 1, File: NoFile})
	}
	for name, m := range map[string]Message{
		"descriptor that did not come": &CaptureEnd{State: 4},
		"no descriptor":                &CaptureEnd{State: NoFile},
		"no CPUs":                      &Restore{Shape: Shape{MemoryMiB: 1}},
		"many CPUs":                    &Restore{Shape: Shape{CPUs: 9, MemoryMiB: 1}},
		"no kernel":                    &Boot{Shape: shape, Kernel: NoFile},
		"many devices":                 &Boot{Shape: shape, Devices: make([]Device, 17)},
		"device without kind":          &Boot{Shape: shape, Devices: make([]Device, 1)},
		"plan beyond memory":           &Restore{Shape: shape, Memory: Memory{Ranges: []Range{{Page: 255, Count: 2, File: NoFile}}}},
		"empty range":                  &Restore{Shape: shape, Memory: Memory{Ranges: []Range{{Page: 1, Count: 0, File: NoFile}}}},
		"many ranges":                  &Restore{Shape: Shape{CPUs: 1, MemoryMiB: 1024}, Memory: many},
	} {
		b, err := Encode(1, m)
		if err != nil {
			t.Fatal(err)
		}
		if _, _, err := Decode(b, 4); !errors.Is(err, errdefs.ErrInvalid) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if _, err := Encode(1, &Boot{Devices: []Device{{Args: make([]byte, MaxMessage)}}}); !errors.Is(err, errdefs.ErrInvalid) {
		t.Errorf("long message: %v", err)
	}
	for _, b := range [][]byte{nil, {1}, make([]byte, 8), {99, 0, 0, 0, 0, 0, 0, 0}, {13, 1, 0, 0, 0, 0, 0, 0}, make([]byte, MaxMessage+1)} {
		if _, _, err := Decode(b, 0); err == nil {
			t.Errorf("packet %.9x of %d is accepted", b, len(b))
		}
	}
}

func TestParseRuns(t *testing.T) {
	var b []byte
	want := []Run{{0, 2, 5}, {2, 1, 0}, {9, 1, 7}}
	for _, r := range want {
		b = AppendRun(b, r)
	}
	if got, err := ParseRuns(b, 10, 8); err != nil || !reflect.DeepEqual(got, want) {
		t.Errorf("%v, %v", got, err)
	}
	for name, r := range map[string]Run{
		"overlap": {9, 1, 0}, "outside": {10, 1, 0}, "empty": {9, 0, 0},
		"wraps": {9, ^uint64(0), 0}, "slot": {9, 1, 8}, "slot wraps": {9, 1, ^uint64(0)},
	} {
		last := AppendRun(b[:len(b)-RunLen:len(b)-RunLen], Run{8, 1, 0})
		if name == "overlap" {
			r.Page = 8
		}
		if _, err := ParseRuns(AppendRun(last, r), 10, 8); !errors.Is(err, errdefs.ErrCorrupt) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if _, err := ParseRuns(b[1:], 10, 8); err == nil {
		t.Error("odd length is accepted")
	}
}

// FuzzDecode: what a process on the other side sends, however odd, is refused or
// encodes to something that decodes to the same.
func FuzzDecode(f *testing.F) {
	for i, m := range samples() {
		b, _ := Encode(uint32(i), m)
		f.Add(b, 4)
	}
	f.Fuzz(func(t *testing.T, b []byte, files int) {
		files = min(max(files, 0), MaxFiles)
		seq, m, err := Decode(b, files)
		if err != nil {
			return
		}
		again, err := Encode(seq, m)
		if err != nil {
			return // unknown fields made room for one longer than allowed
		}
		_, m2, err := Decode(again, files)
		if err != nil || !reflect.DeepEqual(m, m2) {
			t.Fatalf("%+v became %+v, %v", m, m2, err)
		}
	})
}

// FuzzParseRuns: whatever is accepted lies inside of the bounds.
func FuzzParseRuns(f *testing.F) {
	f.Add(AppendRun(nil, Run{1, 2, 3}), uint64(10), uint64(10))
	f.Fuzz(func(t *testing.T, b []byte, pages, slots uint64) {
		runs, err := ParseRuns(b, pages, slots)
		if err != nil {
			return
		}
		for _, r := range runs {
			if r.Page+r.Count > pages || r.Slot+r.Count > slots {
				t.Fatalf("%+v outside of %d, %d", r, pages, slots)
			}
		}
	})
}
