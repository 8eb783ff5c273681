package agentwire

import (
	"time"

	"forkd.dev/forkd/internal/errdefs"
)

// Method is what a call asks for.
type Method uint8

// The methods. Request and reply bodies are in brackets.
const (
	MethodPing          Method = iota + 1 // [] [Pong]
	MethodBoot                            // [BootConfig] []
	MethodExec                            // [ExecRequest] [ExecResult]
	MethodEval                            // [EvalRequest] [EvalResult]
	MethodInterrupt                       // [WarmStart, language only] []
	MethodWarmStart                       // [WarmStart] [EvalResult of the warm code]
	MethodPrepare                         // [Prepare] []
	MethodCommit                          // [] []
	MethodVerdictSource                   // [Clock] [Clock]
	MethodVerdictFork                     // [Identity] [Receipt], with clock notes
	MethodClock                           // [Clock] [Clock]
	MethodShutdown                        // [] []
)

// Status of a reply.
const (
	StatusOK    = 0
	StatusError = 1 // the body is a CallError
)

// Notes within a fork verdict. The agent sets its clock and says NoteClocked with
// its own wall time; the host answers NoteClock with a correction or NoteClockOK.
const (
	NoteClocked = iota + 1 // guest to host [Clock]
	NoteClock              // host to guest [Clock]
	NoteClockOK            // host to guest []
)

// Modes of FrameClose.
const (
	CloseWrite = 0 // the sender will send no more
	CloseAbort = 1 // the stream is over in both directions; a text may say why
)

// StreamWindow is the credit this build gives to the peer of a stream.
const StreamWindow = 256 << 10

// MaxRequest bounds the body of a call to the agent.
const MaxRequest = 32 << 20

// Hello opens a connection.
type Hello struct {
	Nonce   [16]byte
	Version int
}

// HelloAck accepts it with the same nonce.
type HelloAck struct {
	Nonce        [16]byte
	Version      int
	AgentVersion string
}

// WarmStart starts the runner of a language; Code runs in it once per start.
type WarmStart struct {
	Language string // "" means "python"
	Code     string
	Timeout  time.Duration // of Code; 0 means 10 minutes
}

// Prepare freezes user processes for a capture.
type Prepare struct {
	Sync bool // flush file systems once frozen
	// Settle has the agent put its own memory in order first, so that forks find it
	// written already: for a machine that many will be forked from.
	Settle bool
	// Known says that since the last verdict nothing ran in the guest but what the
	// daemon rehearsed: what the agent found out for forks before still holds.
	Known bool
}

// Clock carries a wall time.
type Clock struct {
	Wall time.Time
}

// CallError is why a call failed, as the peer tells it.
type CallError struct {
	Code    string // of errdefs
	Message string
	Hint    string
}

// NewCallError describes err for the wire.
func NewCallError(err error) CallError {
	return CallError{Code: errdefs.Code(err), Message: err.Error(), Hint: errdefs.Hint(err)}
}

// maxErrorText bounds what is believed of a peer's error text.
const maxErrorText = 4 << 10

// Err returns the error that a guest told, as a claim: an unknown, internal or
// outer class counts as ErrGuest, the text is cut and made printable.
func (e CallError) Err() error {
	class := errdefs.FromCode(e.Code)
	switch class {
	case errdefs.ErrInvalid, errdefs.ErrNotFound, errdefs.ErrConflict, errdefs.ErrNotReady, errdefs.ErrUnsupported,
		errdefs.ErrResourceExhausted, errdefs.ErrTimeout, errdefs.ErrCanceled, errdefs.ErrPermission:
	default:
		class = errdefs.ErrGuest
	}
	err := errdefs.New(class, "%s", printable(e.Message))
	if hint := printable(e.Hint); hint != "" {
		err = errdefs.WithHint(err, "%s", hint)
	}
	return err
}

func printable(s string) string {
	if len(s) > maxErrorText {
		s = s[:maxErrorText]
	}
	out := make([]rune, 0, len(s))
	for _, r := range s { // invalid UTF-8 becomes U+FFFD
		if r < ' ' && r != '\n' && r != '\t' || r >= 0x7f && r < 0xa0 {
			r = '\uFFFD'
		}
		out = append(out, r)
	}
	return string(out)
}
