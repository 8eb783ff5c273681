package linux

import (
	"errors"
	"io/fs"

	"golang.org/x/sys/unix"

	"forkd.dev/forkd/internal/errdefs"
)

// retryEINTR repeats call while a signal interrupts it. Go's own preemption
// signal does that to slow ioctls (KVM_CREATE_VM, for one).
func retryEINTR[T any](call func() (T, error)) (T, error) {
	for {
		v, err := call()
		if !errors.Is(err, unix.EINTR) {
			return v, err
		}
	}
}

// classify gives a system call's error its class and keeps the error itself.
func classify(err error) error {
	switch {
	case err == nil:
		return nil
	case errors.Is(err, unix.ESRCH), errors.Is(err, fs.ErrNotExist), errors.Is(err, unix.ENODEV):
		return errdefs.As(errdefs.ErrNotFound, err)
	case errors.Is(err, fs.ErrPermission):
		return errdefs.As(errdefs.ErrPermission, err)
	case errors.Is(err, unix.ENOSYS), errors.Is(err, unix.EOPNOTSUPP), errors.Is(err, unix.ENOTTY):
		return errdefs.As(errdefs.ErrUnsupported, err)
	case errors.Is(err, unix.ENOMEM), errors.Is(err, unix.EMFILE), errors.Is(err, unix.ENFILE), errors.Is(err, unix.ENOSPC):
		return errdefs.As(errdefs.ErrResourceExhausted, err)
	case errors.Is(err, unix.EINVAL):
		return errdefs.As(errdefs.ErrInvalid, err)
	}
	return errdefs.As(errdefs.ErrInternal, err)
}
