//go:build !amd64

package linux

import (
	"context"
	"time"

	"forkd.dev/forkd/internal/errdefs"
)

// throwawayVM does not exist on this architecture.
type throwawayVM struct{}

func openThrowawayVM() (*throwawayVM, error) {
	return nil, errdefs.New(errdefs.ErrUnsupported, "the probe knows x86-64 only")
}

func (*throwawayVM) close() {}

func (*throwawayVM) load([]byte, uint32) error { return errdefs.ErrUnsupported }

func (*throwawayVM) runFor(context.Context, time.Duration) (uint32, time.Duration, error) {
	return 0, 0, errdefs.ErrUnsupported
}

func (*throwawayVM) tscKHz() (uint64, error) { return 0, errdefs.ErrUnsupported }

func readTSC() uint64 { return 0 }
