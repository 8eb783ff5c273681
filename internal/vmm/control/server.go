package control

import (
	"errors"
	"fmt"
	"os"

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

// Server is the control socket of one machine. One goroutine does all.
type Server struct {
	cfg   Config
	conn  int // current connection, -1: none
	id    string
	state vmmwire.State
	disks []*disk // in the order of their devices
	// Room for one packet and its descriptors.
	buf, oob []byte
}

// New makes a server; Run serves.
func New(cfg Config) (*Server, error) {
	// A mapping, not the heap: of 128 KiB, only what was ever received takes memory.
	buf, err := unix.Mmap(-1, 0, vmmwire.MaxMessage, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		return nil, fmt.Errorf("make room for requests: %w", err)
	}
	return &Server{
		cfg: cfg, conn: -1, state: vmmwire.StateBlank, buf: buf, oob: make([]byte, unix.CmsgSpace(4*vmmwire.MaxFiles)),
	}, nil
}

// errQuit: a client asked for the end.
var errQuit = errors.New("asked to quit")

// Run serves connections until the machine has ended and that was told, or a client asked
// to quit. The machine is not closed.
func (s *Server) Run() (machine.End, error) {
	defer s.hangUp()
	for {
		fds := []unix.PollFd{
			{Fd: int32(s.cfg.Machine.EndedFD()), Events: unix.POLLIN},
			{Fd: int32(s.cfg.Listener), Events: unix.POLLIN},
			{Fd: int32(s.conn), Events: unix.POLLIN}, // -1 is passed over
		}
		if _, err := unix.Poll(fds, -1); err == unix.EINTR {
			continue
		} else if err != nil {
			return machine.End{}, fmt.Errorf("wait for requests: %w", err)
		}
		switch {
		case fds[0].Revents != 0:
			return s.finish(), nil
		case fds[1].Revents != 0:
			if err := s.accept(); err != nil {
				return machine.End{}, err
			}
		case fds[2].Revents != 0:
			err := s.serve()
			if errors.Is(err, errQuit) {
				return machine.End{Reason: "a client asked for it", Guest: true}, nil
			}
			if err != nil {
				s.hangUp()
			}
		}
	}
}

// finish stops the machine and tells the client why it ended.
func (s *Server) finish() machine.End {
	s.cfg.Machine.Pause()
	s.state = vmmwire.StateEnded
	end := s.cfg.Machine.End()
	if s.conn >= 0 {
		_ = send(s.conn, 0, &vmmwire.Ended{Reason: end.Reason, Guest: end.Guest})
	}
	return end
}

func (s *Server) hangUp() {
	if s.conn >= 0 {
		_ = unix.Close(s.conn)
		s.conn = -1
	}
}

// accept makes a new connection the only one, and greets.
func (s *Server) accept() error {
	fd, _, err := unix.Accept4(s.cfg.Listener, unix.SOCK_CLOEXEC)
	switch err {
	case nil:
	case unix.EINTR, unix.ECONNABORTED, unix.EAGAIN, unix.EMFILE, unix.ENFILE:
		return nil
	default:
		return fmt.Errorf("accept control connection: %w", err)
	}
	s.hangUp()
	s.conn = fd
	if send(fd, 0, &vmmwire.Hello{
		Version: vmmwire.Version, Build: s.cfg.Build, State: s.state, PID: os.Getpid(), ID: s.id, Lost: s.cfg.Lost,
	}) != nil {
		s.hangUp()
	}
	return nil
}

// serve reads a request, carries it out and replies. Its error ends the connection.
func (s *Server) serve() error {
	n, files, err := receive(s.conn, s.buf, s.oob)
	if err != nil {
		return err
	}
	defer files.Close()
	seq, m, err := vmmwire.Decode(s.buf[:n], files.Len())
	if err != nil {
		return err
	}
	if m.Kind() == vmmwire.KindQuit {
		_ = send(s.conn, seq, &vmmwire.Simple{Of: vmmwire.KindDone})
		return errQuit
	}
	reply, err := s.act(m, files)
	if err != nil {
		reply = &vmmwire.Failed{Code: errdefs.Code(err), Text: err.Error()}
	}
	return send(s.conn, seq, reply)
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

// send never waits: a client that does not read must not hold the machine up.
func send(fd int, seq uint32, m vmmwire.Message) error {
	b, err := vmmwire.Encode(seq, m)
	if err != nil {
		return err
	}
	for {
		err = unix.Sendmsg(fd, b, nil, nil, unix.MSG_NOSIGNAL|unix.MSG_DONTWAIT)
		if err == nil {
			return nil
		}
		if err != unix.EINTR {
			return fmt.Errorf("send reply: %w", err)
		}
	}
}
