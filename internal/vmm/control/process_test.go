package control_test

import (
	"context"
	"errors"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"forkd.dev/forkd/internal/errdefs"
	"forkd.dev/forkd/internal/linux"
	"forkd.dev/forkd/internal/tinyguest"
	"forkd.dev/forkd/internal/vmmhost"
	"forkd.dev/forkd/internal/vmmwire"
)

var program string

func TestMain(m *testing.M) {
	os.Exit(func() int {
		dir, err := os.MkdirTemp("", "forkd-vmm-test")
		if err != nil {
			panic(err)
		}
		defer os.RemoveAll(dir)
		program = filepath.Join(dir, "forkd-vmm")
		build := exec.Command("go", "build", "-trimpath", "-o", program, "forkd.dev/forkd/cmd/forkd-vmm")
		build.Env = append(os.Environ(), "CGO_ENABLED=0")
		if out, err := build.CombinedOutput(); err != nil {
			panic(string(out))
		}
		return m.Run()
	}())
}

var shape = vmmwire.Shape{CPUs: 1, MemoryMiB: 96}

const patience = 20 * time.Second

// vmm is one process with a connection to it.
type vmm struct {
	*vmmhost.Conn
	cmd    *exec.Cmd
	socket string
	out    *os.File // what the guest prints
	in     *os.File
	log    string
	exited chan error
}

func needKVM(t testing.TB) *os.File {
	t.Helper()
	f, err := os.OpenFile("/dev/kvm", os.O_RDWR, 0)
	if err != nil {
		t.Skipf("needs a usable /dev/kvm: %v", err)
	}
	t.Cleanup(func() { f.Close() })
	return f
}

var lastUID atomic.Int32

// takeUID returns a uid that no other process of the test has.
func takeUID() int { return 300000 + int(lastUID.Add(1)) }

// start starts a blank process, confined as far as the user of the test can.
func start(t testing.TB) *vmm {
	t.Helper()
	kvm := needKVM(t)
	dir := t.TempDir()
	v := &vmm{socket: filepath.Join(dir, "control"), log: filepath.Join(dir, "log"), exited: make(chan error, 1)}
	listener, err := linux.ListenPackets(v.socket)
	if err != nil {
		t.Fatal(err)
	}
	defer listener.Close()
	log, err := os.Create(v.log)
	if err != nil {
		t.Fatal(err)
	}
	defer log.Close()
	launch := vmmhost.Launch{
		Program: program, Control: listener, KVM: kvm, Log: log,
		Process: vmmwire.Process{Name: "test", Shape: shape, MaxFiles: 200, MaxFileMiB: 256},
	}
	if os.Getuid() == 0 {
		empty := filepath.Join(dir, "empty")
		if err := os.Mkdir(empty, 0o555); err != nil {
			t.Fatal(err)
		}
		if launch.Root, err = os.Open(empty); err != nil {
			t.Fatal(err)
		}
		defer launch.Root.Close()
		launch.Process.UID = takeUID()
	}
	if v.cmd, err = vmmhost.Start(launch); err != nil {
		t.Fatal(err)
	}
	go func() { v.exited <- v.cmd.Wait() }()
	t.Cleanup(func() {
		_ = v.cmd.Process.Kill()
		if v.Conn != nil {
			v.Close()
		}
		select {
		case <-v.exited:
		case <-time.After(patience):
			t.Error("the process does not end")
		}
	})
	if v.Conn, err = v.dial(t); err != nil {
		t.Fatalf("%v; log: %s", err, v.logText())
	}
	if v.out, v.in, err = os.Pipe(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { v.out.Close(); v.in.Close() })
	return v
}

func (v *vmm) dial(t testing.TB) (*vmmhost.Conn, error) {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	c, err := linux.DialPackets(ctx, v.socket)
	if err != nil {
		return nil, err
	}
	return vmmhost.NewConn(ctx, c)
}

func (v *vmm) logText() string {
	b, _ := os.ReadFile(v.log)
	return string(b)
}

func (v *vmm) ctx(t testing.TB) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	t.Cleanup(cancel)
	return ctx
}

// expect waits for the guest to print b.
func (v *vmm) expect(t testing.TB, want byte) {
	t.Helper()
	if err := v.out.SetReadDeadline(time.Now().Add(patience)); err != nil {
		t.Fatal(err)
	}
	b := make([]byte, 4096)
	for {
		n, err := v.out.Read(b)
		if strings.ContainsRune(string(b[:n]), rune(want)) {
			return
		}
		if err != nil {
			t.Fatalf("the guest did not print %q: %v; log: %s", want, err, v.logText())
		}
	}
}

func fileOf(t testing.TB, name string, content []byte) *os.File {
	t.Helper()
	f, err := linux.MemFile(name, int64(len(content)))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	if _, err := f.WriteAt(content, 0); err != nil {
		t.Fatal(err)
	}
	return f
}

func (v *vmm) boot(t testing.TB, cmdline string) {
	t.Helper()
	err := v.Do(v.ctx(t), &vmmwire.Boot{
		ID: "sbtest", Shape: shape, Kernel: 0, Initrd: vmmwire.NoFile, Cmdline: cmdline,
		Devices: []vmmwire.Device{{Kind: vmmwire.DeviceSerial, Files: []int{1}}},
	}, fileOf(t, "kernel", tinyguest.ELF()), v.in)
	if err != nil {
		t.Fatalf("boot: %v; log: %s", err, v.logText())
	}
	v.expect(t, tinyguest.Ready)
}

func (v *vmm) simple(t testing.TB, k vmmwire.Kind) {
	t.Helper()
	if err := v.Do(v.ctx(t), &vmmwire.Simple{Of: k}); err != nil {
		t.Fatal(err)
	}
}

type snapshot struct {
	pages, state *os.File
	memory       vmmwire.Memory
	done         vmmwire.Captured
}

func (v *vmm) capture(t testing.TB, resume bool) *snapshot {
	t.Helper()
	s := &snapshot{pages: fileOf(t, "pages", nil), state: fileOf(t, "state", nil)}
	index := fileOf(t, "index", nil)
	if _, err := v.Call(v.ctx(t), &vmmwire.CaptureBegin{Pages: 0, Index: 1, MaxPages: 24576}, s.pages, index); err != nil {
		t.Fatal(err)
	}
	r, err := v.Call(v.ctx(t), &vmmwire.CaptureEnd{State: 0, Run: resume}, s.state)
	if err != nil {
		t.Fatal(err)
	}
	s.done = *r.(*vmmwire.Captured)
	b := make([]byte, s.done.Runs*vmmwire.RunLen)
	if _, err := index.ReadAt(b, 0); err != nil && !errors.Is(err, io.EOF) {
		t.Fatal(err)
	}
	runs, err := vmmwire.ParseRuns(b, 24576, s.done.Pages)
	if err != nil {
		t.Fatal(err)
	}
	for _, r := range runs {
		s.memory.Ranges = append(s.memory.Ranges, vmmwire.Range{Page: r.Page, Count: r.Count, File: 0, Offset: r.Slot * vmmwire.PageSize})
	}
	if err := linux.SealImmutable(s.pages); err != nil {
		t.Fatal(err)
	}
	return s
}

func (v *vmm) restore(t testing.TB, s *snapshot) {
	t.Helper()
	err := v.Do(v.ctx(t), &vmmwire.Restore{
		ID: "sbchild", Shape: shape, Memory: s.memory, State: 1, Run: true, Generation: [16]byte{7},
		Devices: []vmmwire.Device{{Kind: vmmwire.DeviceSerial, Files: []int{2}}},
	}, s.pages, s.state, v.in)
	if err != nil {
		t.Fatalf("restore: %v; log: %s", err, v.logText())
	}
}

func TestProcessForks(t *testing.T) {
	parent := start(t)
	if h := parent.Hello(); h.State != vmmwire.StateBlank || h.ID != "" {
		t.Errorf("a blank process says %+v", h)
	}
	t.Logf("confinement that is lost here: %q", parent.Hello().Lost)
	parent.boot(t, "touch=4 wait=1")
	s := parent.capture(t, true)
	for range 3 {
		child := start(t)
		child.restore(t, s)
		child.expect(t, tinyguest.Resumed)
	}
	// A later client finds the machine as it is.
	again, err := parent.dial(t)
	if err != nil {
		t.Fatal(err)
	}
	defer again.Close()
	if h := again.Hello(); h.State != vmmwire.StateRunning || h.ID != "sbtest" {
		t.Errorf("a running process says %+v", h)
	}
	<-parent.Done() // the first connection was replaced
}

// TestRefusals: what a client may not ask for is refused, and the process goes on.
func TestRefusals(t *testing.T) {
	v := start(t)
	kernel := fileOf(t, "kernel", tinyguest.ELF())
	for name, m := range map[string]vmmwire.Message{
		"another shape":         &vmmwire.Boot{Shape: vmmwire.Shape{CPUs: 2, MemoryMiB: 96}, Initrd: vmmwire.NoFile},
		"capture of nothing":    &vmmwire.CaptureEnd{},
		"resume of nothing":     &vmmwire.Simple{Of: vmmwire.KindResume},
		"rollback of nothing":   &vmmwire.Rollback{},
		"a reply as a request":  &vmmwire.Captured{},
		"a greeting in reverse": &vmmwire.Simple{Of: vmmwire.KindDone},
	} {
		if err := v.Do(v.ctx(t), m, kernel); err == nil {
			t.Errorf("%s is accepted", name)
		}
	}
	// What cannot be decoded ends the connection, not the process.
	c, err := linux.DialPackets(v.ctx(t), v.socket)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := c.Write([]byte{99, 1, 2, 3}); err != nil {
		t.Fatal(err)
	}
	if err := c.SetReadDeadline(time.Now().Add(patience)); err != nil {
		t.Fatal(err)
	}
	if _, err := io.Copy(io.Discard, c); err != nil && !errors.Is(err, net.ErrClosed) && !errors.Is(err, io.EOF) {
		t.Errorf("after garbage: %v", err)
	}
	c.Close()
	again, err := v.dial(t)
	if err != nil {
		t.Fatalf("the process is gone after garbage: %v; log %s", err, v.logText())
	}
	defer again.Close()
	if err := again.Do(v.ctx(t), &vmmwire.Simple{Of: vmmwire.KindQuit}); err != nil {
		t.Fatal(err)
	}
	select {
	case <-v.exited:
		v.exited <- nil
	case <-time.After(patience):
		t.Fatal("quit did not end the process")
	}
}

func TestGuestEnds(t *testing.T) {
	for mode, want := range map[string]vmmwire.Ended{
		"power": {Reason: "the guest powered itself off", Guest: true},
		"reset": {Reason: "the guest asked for a reset", Guest: true},
	} {
		v := start(t)
		v.boot(t, "touch=1 mode="+mode)
		select {
		case <-v.Done():
		case <-time.After(patience):
			t.Fatal("the connection does not end")
		}
		if e := v.Ended(); e == nil || *e != want {
			t.Errorf("mode %s: %+v, want %+v", mode, e, want)
		}
		if err := v.Do(v.ctx(t), &vmmwire.Simple{Of: vmmwire.KindResume}); !errors.Is(err, errdefs.ErrGuest) {
			t.Errorf("a call after the end: %v", err)
		}
	}
}
