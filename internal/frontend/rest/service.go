package rest

import (
	"context"

	"forkd.dev/forkd/internal/agentwire"
	"forkd.dev/forkd/internal/engine"
	"forkd.dev/forkd/internal/sandbox"
)

// Service is what the front end needs of the layer below: *sandbox.Service. All
// methods may be called concurrently and stop early when ctx ends. Refs are ids,
// unique prefixes of ids, names or tags; an unknown one is errdefs.ErrNotFound.
type Service interface {
	Sandboxes
	Runner
	Snapshots
	Tags
	Images
	Kernels
	Operator
	Brancher
	Layers
	Packer
	Checkpointer
	Historian
}

// Sandboxes is the life of sandboxes.
type Sandboxes interface {
	// Fork makes f.N sandboxes. each is called once for every child as it becomes
	// ready or fails, never concurrently and not after Fork returned; it may be nil.
	// The items come back ordered by index. An error means that no child of this
	// call is left: nothing started, a child failed without f.Partial, or ctx ended.
	Fork(ctx context.Context, f sandbox.Fork, each func(sandbox.ForkItem)) ([]sandbox.ForkItem, error)
	Sandboxes(ctx context.Context) ([]sandbox.Sandbox, error)
	Sandbox(ctx context.Context, ref string) (sandbox.Sandbox, error)
	// Usage is what a living sandbox consumes on the host.
	Usage(ctx context.Context, ref string) (engine.Usage, error)
	Kill(ctx context.Context, ref string) error
}

// Runner runs code in sandboxes. Exec answers errdefs.ErrNotFound also for a
// program that does not exist in the guest.
type Runner interface {
	Exec(ctx context.Context, ref string, r agentwire.ExecRequest) (agentwire.ExecResult, error)
	Eval(ctx context.Context, ref string, r agentwire.EvalRequest) (agentwire.EvalResult, error)
	Ping(ctx context.Context, ref string) (agentwire.Pong, error)
}

// Snapshots is the life of snapshots. progress may be nil.
type Snapshots interface {
	CreateSnapshot(ctx context.Context, c sandbox.CreateSnapshot, progress sandbox.Progress) (sandbox.Snapshot, error)
	Snapshots(ctx context.Context) ([]sandbox.Snapshot, error)
	Snapshot(ctx context.Context, ref string) (sandbox.Snapshot, error)
	DeleteSnapshot(ctx context.Context, ref string, d sandbox.Delete) error
}

// Tags names snapshots. A taken tag is errdefs.ErrConflict unless t.Replace.
type Tags interface {
	GiveTag(ctx context.Context, ref, tag string, t sandbox.Tagging) error
	Untag(ctx context.Context, tag string) error
}

// Images is the life of images. progress may be nil.
type Images interface {
	BuildImage(ctx context.Context, b sandbox.BuildImage, progress sandbox.Progress) (sandbox.Image, error)
	Images(ctx context.Context) ([]sandbox.Image, error)
	Image(ctx context.Context, ref string) (sandbox.Image, error)
	RemoveImage(ctx context.Context, ref string) error
}
