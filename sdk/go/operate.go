package forkd

import (
	"context"
	"io"
	"net/http"
	"net/url"

	"forkd.dev/forkd/api/rest"
)

// Pool is the pools of a snapshot, Stat the usage of one sandbox.
type (
	Pool = rest.Pool
	Stat = rest.Stat
)

// SetPool keeps n warm machines of a snapshot ready, from which forks start at
// once; 0 ends them. The pool fills in the background and survives restarts.
func (c *Client) SetPool(ctx context.Context, ref string, n int) (Pool, error) {
	return fetch[Pool](ctx, c, http.MethodPut, path("v1", "snapshots", ref, "pool"), rest.SetPool{Warm: &n})
}

// SetBlankPool keeps n blank machines of a snapshot ready: restored, but never run,
// so a fork that claims one skips only the restore. 0 ends them, [DefaultBlank]
// gives the choice back to the daemon. It holds until the daemon ends.
func (c *Client) SetBlankPool(ctx context.Context, ref string, n int) (Pool, error) {
	return fetch[Pool](ctx, c, http.MethodPut, path("v1", "snapshots", ref, "pool"), rest.SetPool{Blank: &n})
}

// DefaultBlank as the size of a blank pool stands for the daemon's default.
const DefaultBlank = -1

// Pools lists the warm pools.
func (c *Client) Pools(ctx context.Context) ([]Pool, error) {
	return fetch[[]Pool](ctx, c, http.MethodGet, "/v1/pools", nil)
}

// Stats measures all living sandboxes.
func (c *Client) Stats(ctx context.Context) ([]Stat, error) {
	return fetch[[]Stat](ctx, c, http.MethodGet, "/v1/stats", nil)
}

// SandboxStats measures one sandbox.
func (c *Client) SandboxStats(ctx context.Context, ref string) (Stat, error) {
	return fetch[Stat](ctx, c, http.MethodGet, path("v1", "sandboxes", ref, "stats"), nil)
}

// LogKind says which log of an object is meant.
type LogKind string

// The logs there are.
const (
	LogAny     LogKind = ""        // the console of a sandbox, else the build log
	LogConsole LogKind = "console" // what a sandbox's kernel printed
	LogBuild   LogKind = "build"   // how a snapshot or an image was made
)

// LogOptions say which part of a log is wanted.
type LogOptions struct {
	Kind   LogKind
	Follow bool // go on until the sandbox or build has ended
}

// Logs copies a log to w. A guest's console may hold anything: escape it before a
// terminal sees it.
func (c *Client) Logs(ctx context.Context, ref string, o LogOptions, w io.Writer) error {
	q := url.Values{}
	if o.Kind != LogAny {
		q.Set("kind", string(o.Kind))
	}
	if o.Follow {
		q.Set("follow", "true")
	}
	target := path("v1", "logs", ref)
	if len(q) > 0 {
		target += "?" + q.Encode()
	}
	return c.download(ctx, target, "log of "+ref, w)
}
