package control

import (
	"fmt"

	"golang.org/x/sys/unix"

	"forkd.dev/forkd/internal/errdefs"
)

// Files are the descriptors that came with a request.
type Files struct{ fds []int }

const taken = -1

func parseFiles(oob []byte) (*Files, error) {
	f := &Files{}
	messages, err := unix.ParseSocketControlMessage(oob)
	if err != nil {
		return f, fmt.Errorf("receive descriptors: %w", err)
	}
	for i := range messages {
		fds, err := unix.ParseUnixRights(&messages[i])
		if err != nil {
			return f, fmt.Errorf("receive descriptors: %w", err)
		}
		f.fds = append(f.fds, fds...)
	}
	return f, nil
}

// Len returns how many came.
func (f *Files) Len() int { return len(f.fds) }

// FD returns descriptor i, which stays with f.
func (f *Files) FD(i int) int { return f.fds[i] }

// Take returns descriptor i, which is the caller's from then on. ErrInvalid: somebody took it.
func (f *Files) Take(i int) (int, error) {
	fd := f.fds[i]
	if fd == taken {
		return -1, errdefs.New(errdefs.ErrInvalid, "descriptor %d is used twice", i)
	}
	f.fds[i] = taken
	return fd, nil
}

// Close closes those that nobody took.
func (f *Files) Close() {
	if f == nil {
		return
	}
	for _, fd := range f.fds {
		if fd != taken {
			_ = unix.Close(fd)
		}
	}
	f.fds = nil
}
