package agentwire

import (
	"bytes"
	"encoding/hex"
	"errors"
	"flag"
	"io"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"testing/iotest"
	"time"
)

var update = flag.Bool("update", false, "rewrite golden files")

// message is any message of the protocol.
type message interface {
	Append(dst []byte) []byte
	Decode(b []byte) error
}

// goldenFrame is one frame whose bytes are fixed for this protocol version.
type goldenFrame struct {
	name    string
	t       FrameType
	id      uint32
	payload []byte
}

func coded(flags, code byte, m message) []byte {
	return m.Append([]byte{flags, code})
}

func goldenFrames() []goldenFrame {
	at := time.Unix(1700000000, 123456789)
	nonce := [16]byte([]byte("0123456789abcdef"))
	return []goldenFrame{
		{"hello", FrameHello, 0, (&Hello{Nonce: nonce, Version: Version}).Append(nil)},
		{"hello_ack", FrameHelloAck, 0, (&HelloAck{Nonce: nonce, Version: Version, AgentVersion: "1.2.3"}).Append(nil)},
		{"call_ping", FrameCall, 1, []byte{0, byte(MethodPing)}},
		{"reply_pong", FrameReply, 1, coded(0, StatusOK, &Pong{
			AgentVersion: "1.2.3", ProtocolVersion: 1, PID: 1, WallClock: at, Uptime: time.Second, WarmupReady: true,
			Runners: []string{"python"}, PythonVersion: "3.11.2", NumpyVersion: "1.24.2", Generation: 7, Threads: 2, Children: 3,
		})},
		{"call_boot", FrameCall, 2, coded(0, byte(MethodBoot), &BootConfig{Hostname: "h", HostTime: at, Env: map[string]string{"A": "b"}, Entropy: []byte("entropy")})},
		{"call_exec", FrameCall, 3, coded(0, byte(MethodExec), &ExecRequest{
			Argv: []string{"echo", "", "x"}, Env: map[string]string{"A": ""}, Cwd: "/tmp", User: "nobody", Stdin: []byte{0, 1, 0}, Timeout: time.Minute, OutputLimit: 100,
		})},
		{"reply_exec", FrameReply, 3, coded(FlagMore, StatusOK, &ExecResult{
			ExitCode: 137, Signal: 9, Stdout: []byte{0xff, 0}, Stderr: []byte("e"), StdoutTruncated: true, StderrTruncated: true,
			TimedOut: true, OOMKilled: true, Duration: 5, CPU: 6, MaxRSSKiB: 7,
		})},
		{"call_eval", FrameCall, 4, coded(0, byte(MethodEval), &EvalRequest{Language: "python", Code: "1+1", Timeout: time.Second, OutputLimit: 9})},
		{"reply_eval", FrameReply, 4, coded(0, StatusOK, &EvalResult{
			HasResult: true, Result: "2", ResultTruncated: true, Stdout: []byte("o"), Stderr: []byte("e"), StdoutTruncated: true,
			StderrTruncated: true, Error: "E: x", Traceback: "T", TimedOut: true, RunnerRestarted: true, Duration: 8,
		})},
		{"call_warm_start", FrameCall, 5, coded(0, byte(MethodWarmStart), &WarmStart{Language: "python", Code: "import json", Timeout: time.Hour})},
		{"call_prepare", FrameCall, 6, coded(0, byte(MethodPrepare), &Prepare{Sync: true, Settle: true, Known: true})},
		{"call_commit", FrameCall, 7, []byte{0, byte(MethodCommit)}},
		{"call_verdict_source", FrameCall, 8, coded(0, byte(MethodVerdictSource), &Clock{Wall: at})},
		{"call_verdict_fork", FrameCall, 9, coded(0, byte(MethodVerdictFork), &Identity{
			SandboxID: "sb0", Hostname: "h", MachineID: "m", BootID: "b", Token: "t", Entropy: []byte("e"), Reseed: ReseedSystem,
			Env: map[string]string{"K": "v"}, Secrets: map[string]string{"S": "s"}, Generation: 3, HostTime: at, Keep: true, Fork: []byte("{}"), RunnerSeed: []byte("seed"),
		})},
		{"reply_receipt", FrameReply, 9, coded(0, StatusOK, &Receipt{
			Steps: []ReceiptStep{{Name: "thaw", Status: "done", Detail: "d"}, {}}, Generation: 3, ClockOffset: -4, Duration: 5, NotCovered: []string{"x"},
		})},
		{"reply_error", FrameReply, 10, coded(0, StatusError, &CallError{Code: "not_found", Message: "m", Hint: "h"})},
		{"note_clocked", FrameNote, 9, coded(0, NoteClocked, &Clock{Wall: at})},
		{"note_clock_ok", FrameNote, 9, []byte{0, NoteClockOK}},
		{"cancel", FrameCancel, 4, nil},
		{"open", FrameOpen, 11, []byte("\x00\x00\x04\x00http")},
		{"stream_data", FrameStreamData, 11, bytes.Repeat([]byte{0, 'x'}, 300)},
		{"stream_data_full_block", FrameStreamData, 11, bytes.Repeat([]byte{'y'}, 600)},
		{"window", FrameWindow, 11, []byte{0, 0, 2, 0}},
		{"close", FrameClose, 11, []byte("\x01why")},
	}
}

func TestGoldenFrames(t *testing.T) {
	for _, g := range goldenFrames() {
		t.Run(g.name, func(t *testing.T) {
			file := filepath.Join("testdata", "v1", g.name+".hex")
			got := AppendFrame(nil, g.t, g.id, g.payload)
			if *update {
				os.MkdirAll(filepath.Dir(file), 0o755)
				if err := os.WriteFile(file, []byte(hex.EncodeToString(got)+"\n"), 0o644); err != nil {
					t.Fatal(err)
				}
			}
			text, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			want, err := hex.DecodeString(strings.TrimSpace(string(text)))
			if err != nil {
				t.Fatal(err)
			}
			if !bytes.Equal(got, want) {
				t.Fatalf("frame %x\nwant  %x", got, want)
			}
			if i := bytes.IndexByte(want, Mark); i != len(want)-1 {
				t.Fatalf("mark at %d of %d", i, len(want))
			}
			f, err := NewReader(iotest.OneByteReader(bytes.NewReader(want))).Next()
			if err != nil || f.Type != g.t || f.ID != g.id || !bytes.Equal(f.Payload, g.payload) {
				t.Fatalf("read %+v, %v", f, err)
			}
		})
	}
}

// messages makes an empty value of each message type.
func messages() map[string]func() message {
	return map[string]func() message{
		"hello": func() message { return new(Hello) }, "hello_ack": func() message { return new(HelloAck) },
		"reply_pong": func() message { return new(Pong) }, "call_boot": func() message { return new(BootConfig) },
		"call_exec": func() message { return new(ExecRequest) }, "reply_exec": func() message { return new(ExecResult) },
		"call_eval": func() message { return new(EvalRequest) }, "reply_eval": func() message { return new(EvalResult) },
		"call_warm_start": func() message { return new(WarmStart) }, "call_prepare": func() message { return new(Prepare) },
		"call_verdict_source": func() message { return new(Clock) }, "call_verdict_fork": func() message { return new(Identity) },
		"reply_receipt": func() message { return new(Receipt) }, "reply_error": func() message { return new(CallError) },
	}
}

// body returns the message in a golden frame.
func (g goldenFrame) body() []byte {
	if g.t == FrameHello || g.t == FrameHelloAck {
		return g.payload
	}
	return g.payload[2:]
}

// TestMessagesComeBack also sees to it that no field was forgotten: every field of
// every golden message has a value other than zero.
func TestMessagesComeBack(t *testing.T) {
	for _, g := range goldenFrames() {
		make := messages()[g.name]
		if make == nil {
			continue
		}
		t.Run(g.name, func(t *testing.T) {
			m := make()
			if err := m.Decode(g.body()); err != nil {
				t.Fatal(err)
			}
			v := reflect.ValueOf(m).Elem()
			for i := range v.NumField() {
				if v.Field(i).IsZero() {
					t.Errorf("field %s did not come back", v.Type().Field(i).Name)
				}
			}
			if again := m.Append(nil); !bytes.Equal(again, g.body()) {
				t.Fatalf("%x came back as %x", g.body(), again)
			}
			// A later version's field is skipped; a cut message is an error or a shorter one.
			e := encoder{m.Append(nil)}
			e.str(1000, "later")
			e.uint(1001, 5)
			if err := make().Decode(e.b); err != nil {
				t.Fatal(err)
			}
			for i := range g.body() {
				make().Decode(g.body()[:i])
			}
		})
	}
}

func TestParts(t *testing.T) {
	pieces := [][]byte{[]byte("ab"), nil, []byte("c")}
	var exec ExecResult
	if err := exec.Decode(bytes.Join((&ExecResult{ExitCode: 3, Stdout: []byte("dropped")}).Parts(pieces, nil), nil)); err != nil ||
		exec.ExitCode != 3 || string(exec.Stdout) != "abc" || exec.Stderr != nil {
		t.Fatalf("%+v %v", exec, err)
	}
	var eval EvalResult
	if err := eval.Decode(bytes.Join((&EvalResult{Result: "r"}).Parts(nil, pieces), nil)); err != nil ||
		eval.Result != "r" || eval.Stdout != nil || string(eval.Stderr) != "abc" {
		t.Fatalf("%+v %v", eval, err)
	}
}

func TestReaderDropsWhatIsNoFrame(t *testing.T) {
	good := AppendFrame(nil, FrameCancel, 5)
	half := AppendFrame(nil, FrameCall, 1, []byte("half of this"))
	broken := AppendFrame(nil, FrameCall, 1, []byte("broken"))
	broken[8] ^= 0x40
	for name, stream := range map[string][]byte{
		"half a frame, then a mark": append(append(append([]byte{}, half[:len(half)-5]...), Mark), good...),
		"half a frame, no mark":     append(append([]byte{}, half[:len(half)-5]...), append(AppendFrame(nil, FrameCancel, 9), good...)...),
		"a flipped bit":             append(append([]byte{}, broken...), good...),
		"endless noise":             append(append(bytes.Repeat([]byte{7}, 5*maxEncoded), Mark), good...),
		"marks only":                append(make([]byte, 1000), good...),
	} {
		t.Run(name, func(t *testing.T) {
			r := NewReader(bytes.NewReader(stream))
			for {
				f, err := r.Next()
				var damaged *DamagedError
				if errors.As(err, &damaged) {
					continue
				}
				if err != nil || f.Type != FrameCancel || f.ID != 5 {
					t.Fatalf("%+v, %v", f, err)
				}
				break
			}
			if cap(r.buf) > 4*maxEncoded {
				t.Fatalf("buffer of %d bytes", cap(r.buf))
			}
			if _, err := r.Next(); err != io.EOF {
				t.Fatal(err)
			}
		})
	}
}

func TestLongestFrame(t *testing.T) {
	for _, fill := range []byte{0, 1} {
		b := AppendFrame(nil, FrameStreamData, 1, bytes.Repeat([]byte{fill}, MaxPayload))
		if f, err := NewReader(bytes.NewReader(b)).Next(); err != nil || len(f.Payload) != MaxPayload {
			t.Fatalf("%d bytes, %v", len(f.Payload), err)
		}
		b = AppendFrame(nil, FrameStreamData, 1, bytes.Repeat([]byte{fill}, MaxPayload+1))
		var damaged *DamagedError
		if _, err := NewReader(bytes.NewReader(b)).Next(); !errors.As(err, &damaged) {
			t.Fatalf("a longer frame: %v", err)
		}
	}
	b := AppendFrame(nil, FrameReply, 1, []byte{0, 0}, bytes.Repeat([]byte{1}, ChunkSize))
	if len(b) > 32<<10 {
		t.Fatalf("a chunk takes %d bytes", len(b))
	}
}

func TestGuestErrorIsAClaim(t *testing.T) {
	err := CallError{Code: "unauthenticated", Message: strings.Repeat("x", 10000) + "\x1b[2J"}.Err()
	if code := NewCallError(err).Code; code != "guest_failure" || len(err.Error()) > maxErrorText {
		t.Fatalf("%s: %d bytes", code, len(err.Error()))
	}
	if err := (CallError{Message: "a\x1b[2J\xff"}).Err(); err.Error() != "a\uFFFD[2J\uFFFD" {
		t.Fatalf("%q", err)
	}
}
