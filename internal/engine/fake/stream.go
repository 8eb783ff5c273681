package fake

import (
	"context"
	"net"

	"forkd.dev/forkd/internal/errdefs"
)

// OpenStream opens no stream: a fake guest is as an agent that knows none.
func (a *Agent) OpenStream(_ context.Context, kind string) (net.Conn, error) {
	return nil, errdefs.New(errdefs.ErrUnsupported, "agent stream %s: there is none in a fake guest", kind)
}
