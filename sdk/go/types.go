package forkd

import "forkd.dev/forkd/api/rest"

// The bodies of the API; api/rest documents their fields.
type (
	Sandbox         = rest.Sandbox
	Receipt         = rest.Receipt
	Timing          = rest.Timing
	Usage           = rest.Usage
	ForkRequest     = rest.CreateSandboxes
	ForkFailure     = rest.ForkFailure
	ChildInput      = rest.ChildInput
	TagRequest      = rest.SetTag
	ExecRequest     = rest.Exec
	ExecResult      = rest.ExecResult
	EvalRequest     = rest.Eval
	EvalResult      = rest.EvalResult
	Pong            = rest.Pong
	Snapshot        = rest.Snapshot
	SnapshotDetail  = rest.SnapshotDetail
	SnapshotRequest = rest.CreateSnapshot
	Start           = rest.Start
	Image           = rest.Image
	ImageRequest    = rest.BuildImage
	Kernel          = rest.Kernel
	VersionInfo     = rest.Version
)

// Int returns a pointer to n, for optional fields.
func Int(n int) *int { return &n }

// Seconds returns a pointer to s, for optional time-outs.
func Seconds(s float64) *float64 { return &s }

// Progress is told what a long call is doing; fraction is negative if unknown.
type Progress func(step string, fraction float64)
