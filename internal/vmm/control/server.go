package control

import (
	"errors"
	"fmt"
	"os"
	"sync"

	"golang.org/x/sys/unix"

	"forkd.dev/forkd/internal/errdefs"
	"forkd.dev/forkd/internal/vmm/machine"
	"forkd.dev/forkd/internal/vmmwire"
)

// Config is what a [Server] serves.
type Config struct {
	Listener int // listening SOCK_SEQPACKET socket; the server owns it
	Machine  *machine.Machine
	Build    string
	Lost     []string // of the confinement
}

// Server is the control socket of one machine.
type Server struct {
	cfg Config

	mu sync.Mutex
	// All below, and the machine, is guarded by mu.
	conn    int // current connection, -1: none
	id      string
	state   vmmwire.State
	stopped bool
	disks   []*disk // in the order of their devices
}

// New makes a server; Run serves.
func New(cfg Config) *Server { return &Server{cfg: cfg, conn: -1, state: vmmwire.StateBlank} }

// Run serves connections until the machine has ended and that was told, or a client asked
// to quit. The machine is not closed.
func (s *Server) Run() (machine.End, error) {
	done := make(chan error, 1)
	go func() { done <- s.accept() }() // ends with the process: accept cannot be woken up
	select {
	case <-s.cfg.Machine.Ended():
		s.finish()
		return s.cfg.Machine.End(), nil
	case err := <-done:
		return machine.End{}, err
	}
}

// finish stops the machine and tells the client why it ended.
func (s *Server) finish() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.cfg.Machine.Pause()
	s.state = vmmwire.StateEnded
	if s.conn >= 0 && !s.stopped {
		end := s.cfg.Machine.End()
		_ = s.sendLocked(s.conn, 0, &vmmwire.Ended{Reason: end.Reason, Guest: end.Guest})
	}
	s.stopped = true
}

var errQuit = errors.New("asked to quit")

func (s *Server) accept() error {
	for {
		fd, _, err := unix.Accept4(s.cfg.Listener, unix.SOCK_CLOEXEC)
		if err == unix.EINTR || err == unix.ECONNABORTED {
			continue
		}
		if err != nil {
			return fmt.Errorf("accept control connection: %w", err)
		}
		s.replace(fd)
		go func() {
			if errors.Is(s.serve(fd), errQuit) {
				s.quit()
			}
		}()
	}
}

// quit ends the machine at a client's wish.
func (s *Server) quit() {
	s.mu.Lock()
	s.stopped = true
	s.mu.Unlock()
	s.cfg.Machine.Stop("a client asked for it")
}

// replace makes fd the only connection, and greets.
func (s *Server) replace(fd int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.conn >= 0 {
		_ = unix.Shutdown(s.conn, unix.SHUT_RDWR) // its goroutine closes it
	}
	s.conn = fd
	_ = s.sendLocked(fd, 0, &vmmwire.Hello{
		Version: vmmwire.Version, Build: s.cfg.Build, State: s.state, PID: os.Getpid(), ID: s.id, Lost: s.cfg.Lost,
	})
}

// serve reads requests until the connection ends.
func (s *Server) serve(fd int) error {
	defer func() {
		s.mu.Lock()
		if s.conn == fd {
			s.conn = -1
		}
		s.mu.Unlock()
		_ = unix.Close(fd)
	}()
	buf, oob := make([]byte, vmmwire.MaxMessage), make([]byte, unix.CmsgSpace(4*vmmwire.MaxFiles))
	for {
		n, files, err := receive(fd, buf, oob)
		if err != nil {
			return err
		}
		seq, m, err := vmmwire.Decode(buf[:n], files.Len())
		if err == nil {
			err = s.answer(fd, seq, m, files)
		}
		files.Close()
		if err != nil {
			return err
		}
	}
}

// receive reads one packet with its descriptors. An empty packet is the end.
func receive(fd int, buf, oob []byte) (int, *Files, error) {
	for {
		n, oobn, flags, _, err := unix.Recvmsg(fd, buf, oob, unix.MSG_CMSG_CLOEXEC)
		if err == unix.EINTR {
			continue
		}
		if err != nil {
			return 0, nil, fmt.Errorf("receive request: %w", err)
		}
		files, err := parseFiles(oob[:oobn])
		switch {
		case err != nil:
		case flags&(unix.MSG_TRUNC|unix.MSG_CTRUNC) != 0:
			err = errdefs.New(errdefs.ErrInvalid, "receive request: it is too long")
		case n == 0:
			err = errdefs.New(errdefs.ErrUnavailable, "receive request: the connection ended")
		}
		if err != nil {
			files.Close()
			return 0, nil, err
		}
		return n, files, nil
	}
}

// answer carries a request out and replies.
func (s *Server) answer(fd int, seq uint32, m vmmwire.Message, files *Files) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.stopped || fd != s.conn {
		return errdefs.New(errdefs.ErrUnavailable, "the machine has ended, or another client has it")
	}
	if m.Kind() == vmmwire.KindQuit {
		_ = s.sendLocked(fd, seq, &vmmwire.Simple{Of: vmmwire.KindDone})
		return errQuit
	}
	reply, err := s.actLocked(m, files)
	if err != nil {
		reply = &vmmwire.Failed{Code: errdefs.Code(err), Text: err.Error()}
	}
	return s.sendLocked(fd, seq, reply)
}

func (s *Server) sendLocked(fd int, seq uint32, m vmmwire.Message) error {
	b, err := vmmwire.Encode(seq, m)
	if err != nil {
		return err
	}
	for {
		// A client that does not read must not hold the machine up.
		err = unix.Sendmsg(fd, b, nil, nil, unix.MSG_NOSIGNAL|unix.MSG_DONTWAIT)
		if err != unix.EINTR {
			break
		}
	}
	if err != nil {
		return fmt.Errorf("send reply: %w", err)
	}
	return nil
}
