package control_test

import (
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"

	"forkd.dev/forkd/internal/linux"
	"forkd.dev/forkd/internal/tinyguest"
	"forkd.dev/forkd/internal/vmmhost"
	"forkd.dev/forkd/internal/vmmwire"
)

// TestThousandLiveMachines: a thousand forks of one snapshot run at once, each in its own confined process, and
// then all are gone, with nothing left over.
func TestThousandLiveMachines(t *testing.T) {
	const n, atATime = 1000, 8
	parent := start(t)
	parent.boot(t, "touch=4 wait=1")
	s := parent.capture(t, false)
	// All guests write to one pipe: each prints one mark.
	out, in, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer out.Close()
	defer in.Close()
	dir := t.TempDir()
	forks := make([]*fork, n)
	defer func() {
		for _, f := range forks {
			if f != nil {
				f.kill()
			}
		}
		for i, f := range forks {
			if f != nil {
				f.wait()
				f.Close()
				if _, err := os.Stat("/proc/" + strconv.Itoa(f.pid)); err == nil {
					t.Errorf("process %d of fork %d is still there", f.pid, i)
				}
			}
		}
	}()
	var wg sync.WaitGroup
	next := make(chan int, n)
	for i := range n {
		next <- i
	}
	close(next)
	for range atATime {
		wg.Go(func() {
			for i := range next {
				f, err := startFork(t, filepath.Join(dir, strconv.Itoa(i)), s, in)
				if err != nil {
					t.Errorf("fork %d: %v", i, err)
					return
				}
				forks[i] = f
			}
		})
	}
	marks := 0
	b := make([]byte, 4096)
	for marks < n && !t.Failed() {
		got, err := out.Read(b)
		if err != nil {
			t.Fatal(err)
		}
		marks += strings.Count(string(b[:got]), string(rune(tinyguest.Resumed)))
	}
	wg.Wait()
	if marks != n {
		t.Errorf("%d of %d guests answered", marks, n)
	}
	for i, f := range forks {
		if f == nil {
			continue
		}
		select {
		case <-f.Done():
			t.Errorf("fork %d has ended: %+v", i, f.Ended())
		default:
		}
	}
}

// fork is a process of the test.
type fork struct {
	*vmmhost.Conn
	pid  int
	kill func()
	wait func()
}

func startFork(t *testing.T, socket string, s *snapshot, serial *os.File) (*fork, error) {
	listener, err := linux.ListenPackets(socket)
	if err != nil {
		return nil, err
	}
	defer listener.Close()
	kvm, err := os.OpenFile("/dev/kvm", os.O_RDWR, 0)
	if err != nil {
		return nil, err
	}
	defer kvm.Close()
	l := vmmhost.Launch{
		Program: program, Control: listener, KVM: kvm, Log: os.Stderr,
		Process: vmmwire.Process{Name: "test", Shape: shape, MaxFiles: 200, MaxFileMiB: 256},
	}
	if os.Getuid() == 0 {
		if l.Root, err = os.Open(t.TempDir()); err != nil {
			return nil, err
		}
		defer l.Root.Close()
		l.Process.UID = takeUID()
	}
	cmd, err := vmmhost.Start(l)
	if err != nil {
		return nil, err
	}
	f := &fork{pid: cmd.Process.Pid, kill: func() { _ = cmd.Process.Kill() }, wait: func() { _ = cmd.Wait() }}
	c, err := linux.DialPackets(t.Context(), socket)
	if err == nil {
		f.Conn, err = vmmhost.NewConn(t.Context(), c)
	}
	if err == nil {
		err = f.Do(t.Context(), &vmmwire.Restore{
			ID: "sbfork", Shape: shape, Memory: s.memory, State: 1, Run: true, Generation: [16]byte{9, 9},
			Devices: []vmmwire.Device{{Kind: vmmwire.DeviceSerial, Files: []int{2}}},
		}, s.pages, s.state, serial)
	}
	if err != nil {
		f.kill()
		f.wait()
		return nil, err
	}
	return f, nil
}
