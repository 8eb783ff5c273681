package kvm

import (
	"context"
	"fmt"
	"path/filepath"
	"time"

	"forkd.dev/forkd/internal/errdefs"
	"forkd.dev/forkd/internal/linux"
	"forkd.dev/forkd/internal/vmmhost"
)

// helloPatience bounds the wait for the first message of a process that was just started.
const helloPatience = 20 * time.Second

// dial connects to the control socket in dir.
func dial(ctx context.Context, dir string) (*vmmhost.Conn, error) {
	ctx, cancel := context.WithTimeout(ctx, helloPatience)
	defer cancel()
	conn, err := linux.DialPackets(ctx, filepath.Join(dir, controlSocket))
	if err != nil {
		return nil, fmt.Errorf("%w: %w", err, errdefs.ErrUnavailable)
	}
	return vmmhost.NewConn(ctx, conn)
}

// turn is a mutex that can be waited for with a context.
type turn chan struct{}

func newTurn() turn { return make(turn, 1) }

func (t turn) take(ctx context.Context) error {
	select {
	case t <- struct{}{}:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (t turn) give() { <-t }
