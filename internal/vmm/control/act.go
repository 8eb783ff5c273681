package control

import (
	"fmt"
	"time"

	"golang.org/x/sys/unix"

	"forkd.dev/forkd/internal/errdefs"
	"forkd.dev/forkd/internal/vmm/arch"
	"forkd.dev/forkd/internal/vmm/machine"
	"forkd.dev/forkd/internal/vmm/memory"
	"forkd.dev/forkd/internal/vmm/vmstate"
	"forkd.dev/forkd/internal/vmmwire"
)

// act carries out one request.
func (s *Server) act(m vmmwire.Message, files *Files) (vmmwire.Message, error) {
	done := &vmmwire.Simple{Of: vmmwire.KindDone}
	vm := s.cfg.Machine
	switch m := m.(type) {
	case *vmmwire.Boot:
		return done, s.begin(m.ID, m.Shape, func() error { return s.boot(m, files) }, !m.Paused)
	case *vmmwire.Restore:
		return done, s.begin(m.ID, m.Shape, func() error { return s.restore(m, files) }, m.Run)
	case *vmmwire.Rollback:
		return done, s.rollback(m, files)
	case *vmmwire.CaptureBegin:
		return s.captureBegin(m, files)
	case *vmmwire.CaptureEnd:
		reply, err := s.captureEnd(m, files)
		return &reply, err
	case *vmmwire.Simple:
		switch m.Of {
		case vmmwire.KindPause:
			vm.Pause()
			s.updateState()
			return done, nil
		case vmmwire.KindResume:
			err := vm.Resume()
			s.updateState()
			return done, err
		case vmmwire.KindCaptureAbort:
			vm.CaptureAbort()
			return done, nil
		case vmmwire.KindStored:
			vm.Stored()
			return done, nil
		case vmmwire.KindStats:
			return s.stats()
		}
	}
	return nil, errdefs.New(errdefs.ErrInvalid, "message of kind %d is no request", m.Kind())
}

func (s *Server) updateState() {
	if s.cfg.Machine.Running() {
		s.state = vmmwire.StateRunning
	} else if s.state != vmmwire.StateBlank {
		s.state = vmmwire.StatePaused
	}
}

// begin gives a blank machine its content. A machine that failed half-way is of no use.
func (s *Server) begin(id string, shape vmmwire.Shape, fill func() error, run bool) error {
	if s.state != vmmwire.StateBlank {
		return errdefs.New(errdefs.ErrConflict, "this process has a machine already")
	}
	if cpus, bytes := s.cfg.Machine.Shape(); shape.CPUs != cpus || uint64(shape.MemoryMiB)<<20 != bytes {
		return errdefs.New(errdefs.ErrInvalid, "this process was made for %d CPUs and %d MiB, not %d and %d", cpus, bytes>>20, shape.CPUs, shape.MemoryMiB)
	}
	s.id = id
	if err := fill(); err != nil {
		s.cfg.Machine.Stop("it could not be started: " + err.Error())
		return err
	}
	s.state = vmmwire.StatePaused
	if run {
		if err := s.cfg.Machine.Resume(); err != nil {
			return err
		}
		s.state = vmmwire.StateRunning
	}
	return nil
}

func (s *Server) addDevices(devices []vmmwire.Device, files *Files) error {
	for i, d := range devices {
		if err := s.addDevice(d, files); err != nil {
			return fmt.Errorf("add device %d of kind %d: %w", i, d.Kind, err)
		}
	}
	return nil
}

// reader reads a file by its descriptor.
type reader int

// ReadAt implements io.ReaderAt; the file ends where it was measured.
func (r reader) ReadAt(p []byte, off int64) (int, error) {
	for n := 0; n < len(p); {
		got, err := unix.Pread(int(r), p[n:], off+int64(n))
		if err == unix.EINTR {
			continue
		}
		if err != nil {
			return n, err
		}
		if got == 0 {
			return n, errdefs.New(errdefs.ErrInvalid, "the file ends at %d", off+int64(n))
		}
		n += got
	}
	return len(p), nil
}

func size(fd int) (int64, error) {
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return 0, fmt.Errorf("stat descriptor: %w", err)
	}
	if st.Mode&unix.S_IFMT != unix.S_IFREG {
		return 0, errdefs.New(errdefs.ErrInvalid, "a descriptor is of no regular file")
	}
	return st.Size, nil
}

func (s *Server) boot(m *vmmwire.Boot, files *Files) error {
	if err := s.addDevices(m.Devices, files); err != nil {
		return err
	}
	n, err := size(files.FD(m.Kernel))
	if err != nil {
		return err
	}
	b := arch.Boot{Kernel: arch.File{ReaderAt: reader(files.FD(m.Kernel)), Bytes: n}, Cmdline: m.Cmdline}
	if m.Initrd != vmmwire.NoFile {
		n, err := size(files.FD(m.Initrd))
		if err != nil {
			return err
		}
		b.Initrd = &arch.File{ReaderAt: reader(files.FD(m.Initrd)), Bytes: n}
	}
	return s.cfg.Machine.Boot(b)
}

// readState reads the state file of a capture.
func readState(fd int) ([]byte, error) {
	n, err := size(fd)
	if err != nil {
		return nil, err
	}
	if n > vmstate.MaxBytes {
		return nil, fmt.Errorf("%w: %d bytes", vmstate.ErrSize, n)
	}
	b := make([]byte, n)
	_, err = reader(fd).ReadAt(b, 0)
	return b, err
}

// plan turns the ranges of a message into sources.
func plan(m vmmwire.Memory, files *Files) (memory.Plan, error) {
	out := make(memory.Plan, 0, len(m.Ranges))
	sources := map[int]*memory.Source{}
	for _, r := range m.Ranges {
		pr := memory.Range{Page: r.Page, Count: r.Count, Offset: r.Offset}
		if r.File != vmmwire.NoFile {
			if sources[r.File] == nil {
				src, err := memory.NewSource(files.FD(r.File))
				if err != nil {
					return nil, err
				}
				sources[r.File] = &src
			}
			pr.Source = sources[r.File]
		}
		out = append(out, pr)
	}
	return out, nil
}

func (s *Server) restore(m *vmmwire.Restore, files *Files) error {
	p, err := plan(m.Memory, files)
	if err != nil {
		return err
	}
	state, err := readState(files.FD(m.State))
	if err != nil {
		return err
	}
	if err := s.addDevices(m.Devices, files); err != nil {
		return err
	}
	return s.cfg.Machine.Restore(p, state, m.Generation)
}

func (s *Server) rollback(m *vmmwire.Rollback, files *Files) error {
	if len(m.Devices) > 0 {
		return errdefs.New(errdefs.ErrUnsupported, "devices cannot change their files in a rollback")
	}
	p, err := plan(m.Memory, files)
	if err != nil {
		return err
	}
	state, err := readState(files.FD(m.State))
	if err != nil {
		return err
	}
	err = s.cfg.Machine.Rollback(machine.Rollback{Plan: p, State: state, ToParent: m.ToLast, Generation: m.Generation})
	if err == nil && m.Run {
		err = s.cfg.Machine.Resume()
	}
	s.updateState()
	return err
}

// captureBegin keeps the descriptors until the capture ends.
func (s *Server) captureBegin(m *vmmwire.CaptureBegin, files *Files) (vmmwire.Message, error) {
	pages, err := files.Take(m.Pages)
	if err != nil {
		return nil, err
	}
	index, err := files.Take(m.Index)
	if err != nil {
		_ = unix.Close(pages)
		return nil, err
	}
	rounds, err := s.cfg.Machine.CaptureBegin(machine.Capture{
		Pages: pages, Index: index, MaxPages: m.MaxPages, Everything: m.Everything, NoCopy: m.NoCopy,
	})
	return &vmmwire.Captured{Rounds: rounds}, err
}

func (s *Server) captureEnd(m *vmmwire.CaptureEnd, files *Files) (vmmwire.Captured, error) {
	if m.Run && len(m.Devices) == 0 && len(s.disks) > 0 {
		return vmmwire.Captured{}, errdefs.New(errdefs.ErrInvalid, "end capture: the disks need overlays to go on with")
	}
	next, err := s.nextOverlays(m.Devices, files)
	if err != nil {
		return vmmwire.Captured{}, err
	}
	reply, err := s.cfg.Machine.CaptureEnd(files.FD(m.State), m.Run, func() error { return s.seal(next) })
	s.updateState()
	return reply, err
}

func (s *Server) stats() (vmmwire.Message, error) {
	private, err := s.cfg.Machine.Memory().Private()
	if err != nil {
		return nil, err
	}
	var ru unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_SELF, &ru); err != nil {
		return nil, fmt.Errorf("read usage: %w", err)
	}
	return &vmmwire.Stats{
		State: s.state, Exits: s.cfg.Machine.Exits(), PrivatePages: memory.Count(private),
		CPU: time.Duration(ru.Utime.Nano() + ru.Stime.Nano()), Waiting: s.cfg.Machine.Waiting(),
	}, nil
}
