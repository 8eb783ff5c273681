package vmmbench

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"time"

	"forkd.dev/forkd/internal/errdefs"
	"forkd.dev/forkd/internal/linux"
	"forkd.dev/forkd/internal/tinyguest"
	"forkd.dev/forkd/internal/vmmhost"
	"forkd.dev/forkd/internal/vmmwire"
)

const (
	memoryMiB  = 512
	pageSize   = vmmwire.PageSize
	pages      = memoryMiB << 20 / pageSize
	baseMiB    = 128 // where the guest's memory begins
	patience   = 30 * time.Second
	maxFiles   = 200
	maxFileMiB = 2 * memoryMiB
	firstUID   = 1 << 30
	serialAt   = 2 // position of the serial port's file
)

var shape = vmmwire.Shape{CPUs: 1, MemoryMiB: memoryMiB}

// host is what all processes of a measurement share.
type host struct {
	program string
	dir     string // of sockets
	kvm     *os.File
	empty   *os.File
	log     *os.File
}

func openHost(program []byte) (_ *host, err error) {
	h := &host{}
	defer func() {
		if err != nil {
			h.close()
		}
	}()
	if h.dir, err = os.MkdirTemp("", "forkd-bench-vmm-"); err != nil {
		return nil, err
	}
	h.program = filepath.Join(h.dir, "forkd-vmm")
	if err := os.WriteFile(h.program, program, 0o755); err != nil {
		return nil, err
	}
	if h.kvm, err = os.OpenFile("/dev/kvm", os.O_RDWR, 0); err != nil {
		return nil, errdefs.As(errdefs.ErrUnsupported, fmt.Errorf("measure forkd-vmm: %w", err))
	}
	if h.log, err = os.Create(filepath.Join(h.dir, "log")); err != nil {
		return nil, err
	}
	empty := filepath.Join(h.dir, "empty")
	if err := os.Mkdir(empty, 0o555); err != nil {
		return nil, err
	}
	h.empty, err = os.Open(empty)
	return h, err
}

func (h *host) close() {
	for _, f := range []*os.File{h.kvm, h.empty, h.log} {
		if f != nil {
			f.Close()
		}
	}
	_ = os.RemoveAll(h.dir)
}

// said returns what processes wrote to their log.
func (h *host) said(err error) error {
	b, _ := os.ReadFile(h.log.Name())
	if len(b) == 0 {
		return err
	}
	return fmt.Errorf("%w; forkd-vmm said: %s", err, b)
}

// vmm is one process.
type vmm struct {
	*vmmhost.Conn
	cmd    *exec.Cmd
	socket string
	out    *os.File // what its guest prints
	in     *os.File
}

// start starts a process and waits until it is ready. id is its own among those that live.
func (h *host) start(ctx context.Context, id int) (_ *vmm, err error) {
	v := &vmm{socket: filepath.Join(h.dir, strconv.Itoa(id))}
	defer func() {
		if err != nil {
			v.end()
			err = h.said(err)
		}
	}()
	listener, err := linux.ListenPackets(v.socket)
	if err != nil {
		return nil, err
	}
	defer listener.Close()
	if v.out, v.in, err = os.Pipe(); err != nil {
		return nil, err
	}
	l := vmmhost.Launch{
		Program: h.program, Control: listener, KVM: h.kvm, Log: h.log,
		Process: vmmwire.Process{Name: "forkd-bench", Shape: shape, MaxFiles: maxFiles, MaxFileMiB: maxFileMiB},
	}
	if os.Getuid() == 0 {
		l.Root, l.Process.UID = h.empty, firstUID+id
	}
	if v.cmd, err = vmmhost.Start(l); err != nil {
		return nil, err
	}
	c, err := linux.DialPackets(ctx, v.socket)
	if err != nil {
		return nil, err
	}
	v.Conn, err = vmmhost.NewConn(ctx, c)
	return v, err
}

// end ends the process and removes what it had. It may be called in any state.
func (v *vmm) end() {
	v.kill()
	v.reap()
}

func (v *vmm) kill() {
	if v.cmd != nil {
		_ = v.cmd.Process.Kill()
	}
}

func (v *vmm) reap() {
	if v.cmd != nil {
		_ = v.cmd.Wait()
	}
	if v.Conn != nil {
		v.Close()
	}
	for _, f := range []*os.File{v.out, v.in} {
		if f != nil {
			f.Close()
		}
	}
	_ = os.Remove(v.socket)
}

// expect waits for the guest to print b.
func (v *vmm) expect(ctx context.Context, want byte) error {
	if err := v.out.SetReadDeadline(time.Now().Add(patience)); err != nil {
		return err
	}
	stop := context.AfterFunc(ctx, func() { _ = v.out.SetReadDeadline(time.Now()) })
	defer stop()
	var b [1]byte
	for b[0] != want {
		if _, err := v.out.Read(b[:]); err != nil {
			return fmt.Errorf("wait for the guest to print %q: %w", want, err)
		}
	}
	return nil
}

// snapshot is a captured guest: memory as one sealed file, and its state.
type snapshot struct {
	memory, state *os.File
	ranges        []vmmwire.Range
}

func (s *snapshot) close() {
	s.memory.Close()
	s.state.Close()
}

// boot starts the tiny guest.
func (v *vmm) boot(ctx context.Context, cmdline string) error {
	kernel, err := linux.MemFile("kernel", int64(len(tinyguest.ELF())))
	if err != nil {
		return err
	}
	defer kernel.Close()
	if _, err := kernel.WriteAt(tinyguest.ELF(), 0); err != nil {
		return err
	}
	boot := &vmmwire.Boot{
		ID: "parent", Shape: shape, Initrd: vmmwire.NoFile, Cmdline: cmdline,
		Devices: []vmmwire.Device{{Kind: vmmwire.DeviceSerial, Files: []int{1}}},
	}
	if err := v.Do(ctx, boot, kernel, v.in); err != nil {
		return err
	}
	return v.expect(ctx, tinyguest.Ready)
}

// makeSnapshot boots a guest and captures it once it is ready.
func (h *host) makeSnapshot(ctx context.Context, cmdline string) (*snapshot, error) {
	v, err := h.start(ctx, 0)
	if err != nil {
		return nil, err
	}
	defer v.end()
	if err := v.boot(ctx, cmdline); err != nil {
		return nil, h.said(err)
	}
	c, err := newCapture()
	if err != nil {
		return nil, err
	}
	defer c.close()
	if _, err := c.take(ctx, v, false); err != nil {
		return nil, err
	}
	return c.snapshot()
}

// capture holds the files of a capture. The pages have memory already, as a daemon keeps it.
type capture struct {
	pages, index, state *os.File
	done                vmmwire.Captured
}

func newCapture() (*capture, error) {
	var c capture
	var err error
	for _, f := range []**os.File{&c.pages, &c.index, &c.state} {
		var e error
		*f, e = linux.MemFile("forkd-bench", 0)
		err = errors.Join(err, e)
	}
	if err != nil {
		c.close()
		return nil, err
	}
	return &c, nil
}

func (c *capture) close() {
	for _, f := range []*os.File{c.pages, c.index, c.state} {
		if f != nil {
			f.Close()
		}
	}
}

// take captures v and returns how long both calls took.
func (c *capture) take(ctx context.Context, v *vmm, resume bool) (time.Duration, error) {
	start := time.Now()
	if _, err := v.Call(ctx, &vmmwire.CaptureBegin{Pages: 0, Index: 1, MaxPages: pages}, c.pages, c.index); err != nil {
		return 0, err
	}
	r, err := v.Call(ctx, &vmmwire.CaptureEnd{State: 0, Run: resume}, c.state)
	if err != nil {
		return 0, err
	}
	done, ok := r.(*vmmwire.Captured)
	if !ok {
		return 0, errdefs.New(errdefs.ErrGuest, "a capture is answered by a message of kind %d", r.Kind())
	}
	c.done = *done
	return time.Since(start), nil
}

// snapshot lays the pages out as one memory file.
func (c *capture) snapshot() (_ *snapshot, err error) {
	b := make([]byte, c.done.Runs*vmmwire.RunLen)
	if _, err := c.index.ReadAt(b, 0); err != nil {
		return nil, err
	}
	runs, err := vmmwire.ParseRuns(b, pages, c.done.Pages)
	if err != nil {
		return nil, err
	}
	s := &snapshot{state: c.state}
	if s.memory, err = linux.MemFile("forkd-bench-memory", memoryMiB<<20); err != nil {
		return nil, err
	}
	c.state = nil
	defer func() {
		if err != nil {
			s.close()
		}
	}()
	for _, r := range runs {
		buf := make([]byte, r.Count*pageSize)
		if _, err := c.pages.ReadAt(buf, int64(r.Slot*pageSize)); err != nil {
			return nil, err
		}
		if _, err := s.memory.WriteAt(buf, int64(r.Page*pageSize)); err != nil {
			return nil, err
		}
	}
	// One mapping, as of a memory image: holes are zero.
	s.ranges = []vmmwire.Range{{Page: 0, Count: pages, File: 0}}
	return s, linux.SealImmutable(s.memory)
}

// restore makes v a fork of s and waits until its guest answers.
func (v *vmm) restore(ctx context.Context, s *snapshot, generation int) error {
	m := &vmmwire.Restore{
		ID: "fork", Shape: shape, Memory: vmmwire.Memory{Ranges: s.ranges}, State: 1, Run: true,
		Devices: []vmmwire.Device{{Kind: vmmwire.DeviceSerial, Files: []int{serialAt}}},
	}
	m.Generation[0], m.Generation[1], m.Generation[2] = 1, byte(generation), byte(generation>>8)
	if err := v.Do(ctx, m, s.memory, s.state, v.in); err != nil {
		return err
	}
	return v.expect(ctx, tinyguest.Resumed)
}
