package agentwire

import "time"

// Version is the agent protocol version spoken by this build. The daemon
// serves every version listed in SPECIFICATION.md, because old snapshots hold
// old agents.
const Version = 1

// Reseed says how far a fork's generators are made unique.
type Reseed string

// The reseed modes of the fork contract.
const (
	ReseedAll    Reseed = "all"    // kernel pool, tokens, ids and the runners' generators
	ReseedSystem Reseed = "system" // kernel pool, tokens, ids; user-space generators go on
	ReseedSeed   Reseed = "seed"   // as all, but the runners' generators come from RunnerSeed
)

// Identity is what the host gives a fork before any user code runs in it.
type Identity struct {
	SandboxID  string
	Hostname   string
	MachineID  string            // 32 lower-case hex digits
	BootID     string            // RFC 4122 text form
	Token      string            // per-sandbox bearer token; never logged
	Entropy    []byte            // 64 bytes from the host's CSPRNG for the kernel pool
	Reseed     Reseed            // "" means ReseedAll
	Env        map[string]string // added to the environment of everything started later
	Secrets    map[string]string // as Env, never logged or listed
	Generation uint64            // value for the generation file; greater than before
	HostTime   time.Time         // the host's wall clock at sending
	// Keep makes it a rollback: hostname, machine id, boot id, token and environment
	// stay as captured, and their fields are ignored.
	Keep bool
	// Fork is the content of /run/forkd/fork.json, or nil: what the sandbox is told
	// about its place in the fork call.
	Fork []byte
	// RunnerSeed, 64 bytes, is for ReseedSeed only.
	RunnerSeed []byte
}

// Receipt lists what the agent made unique, in the order of the fork contract.
type Receipt struct {
	Steps       []ReceiptStep
	Generation  uint64
	ClockOffset time.Duration // guest minus host, checked by the host, after the last correction
	Duration    time.Duration // guest's own monotonic time from identity to thaw
	NotCovered  []string      // what the agent knows it could not make unique, in words
}

// ReceiptStep is one item of a receipt.
type ReceiptStep struct {
	Name   string // e.g. "kernel_csprng", "wall_clock", "hostname", "machine_id", "boot_id", "ssh_host_keys", "token", "env", "generation_file", "runner:python", "hook:NAME", "thaw"
	Status string // "done", "absent" (there was nothing to do), "failed"
	Detail string
}

// ExecRequest runs one program in the guest.
type ExecRequest struct {
	Argv    []string
	Env     map[string]string // added to the sandbox environment
	Cwd     string            // "" means the user's home
	User    string            // name or uid[:gid]; "" means root
	Stdin   []byte            // nil means EOF at once
	Timeout time.Duration     // 0 means DefaultExecTimeout
	// OutputLimit bounds each of stdout and stderr; 0 means DefaultOutputLimit,
	// more than MaxOutputLimit is invalid. What exceeds it is read and dropped, so
	// the program never blocks, and Truncated is set.
	OutputLimit int
}

// Limits of exec and eval.
const (
	DefaultExecTimeout = 30 * time.Second
	MaxExecTimeout     = 24 * time.Hour
	DefaultOutputLimit = 8 << 20
	MaxOutputLimit     = 64 << 20
)

// ExecResult is the end of a program.
type ExecResult struct {
	ExitCode        int // 128+Signal if a signal ended it
	Signal          int // 0 unless a signal ended it
	Stdout, Stderr  []byte
	StdoutTruncated bool
	StderrTruncated bool
	TimedOut        bool
	OOMKilled       bool
	Duration        time.Duration
	CPU             time.Duration // user + system of the process and its waited-for children
	MaxRSSKiB       int64
}

// EvalRequest evaluates code in a warm runner whose state persists between calls.
type EvalRequest struct {
	Language    string // "" means "python"
	Code        string
	Timeout     time.Duration // 0 means DefaultExecTimeout
	OutputLimit int           // bounds stdout, stderr and Result each, as in ExecRequest
}

// EvalResult is the outcome of an eval. Exactly one of these holds: Error is
// empty and the code ran to its end; or Error says what was raised or went wrong.
type EvalResult struct {
	HasResult       bool   // the code ended in an expression whose value is not None
	Result          string // its repr
	ResultTruncated bool
	Stdout, Stderr  []byte
	StdoutTruncated bool
	StderrTruncated bool
	Error           string // e.g. "ZeroDivisionError: division by zero"
	Traceback       string
	TimedOut        bool
	// RunnerRestarted: the runner died or had to be killed. Its state is lost; the
	// next eval meets a fresh runner in which the snapshot's warm code ran again.
	RunnerRestarted bool
	Duration        time.Duration
}

// Pong is the answer to a ping.
type Pong struct {
	AgentVersion    string
	ProtocolVersion int
	PID             int
	WallClock       time.Time
	Uptime          time.Duration // guest monotonic clock
	WarmupReady     bool          // a language runner is up
	Runners         []string      // languages with a live runner
	PythonVersion   string        // of the runner, "" if none
	NumpyVersion    string        // "" if numpy is not imported in the runner
	Generation      uint64
	Threads         int // extra threads of the runner, for the pre-warm rule
	Children        int // child processes of the runner
}

// BootConfig is what the host tells a freshly booted agent, once, before anything else.
type BootConfig struct {
	Hostname string
	HostTime time.Time
	Env      map[string]string
	Entropy  []byte
}
