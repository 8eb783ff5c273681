package rest

// Sandbox is a running or lately ended sandbox. The first ten fields are
// upstream's SandboxInfo.
type Sandbox struct {
	ID                   string  `json:"id"`
	SnapshotTag          string  `json:"snapshot_tag"` // the tag asked for, or the snapshot's id
	Netns                *string `json:"netns"`        // always null: there is no shared network
	GuestAddr            string  `json:"guest_addr"`   // always "": the agent is reached through the API
	CreatedAtUnix        int64   `json:"created_at_unix"`
	PID                  *int    `json:"pid"`
	MemoryLimitMiB       *int    `json:"memory_limit_mib"`
	HasBranched          bool    `json:"has_branched"`
	LastBranchMemoryPath *string `json:"last_branch_memory_path"` // always null
	BranchCount          int     `json:"branch_count"`

	Name         string            `json:"name,omitempty"`
	State        string            `json:"state"`
	Reason       string            `json:"reason,omitempty"` // of its end or failure
	SnapshotID   string            `json:"snapshot_id"`
	Engine       string            `json:"engine"`
	Isolation    string            `json:"isolation"`
	CPUs         int               `json:"cpus"`
	MemoryMiB    int               `json:"memory_mib"`
	DiskMiB      int               `json:"disk_mib"`
	CPULimit     *float64          `json:"cpu_limit,omitempty"` // processors
	PIDsLimit    *int              `json:"pids_limit,omitempty"`
	Labels       map[string]string `json:"labels"`
	EndedAtUnix  *int64            `json:"ended_at_unix,omitempty"`
	HoldsSecrets bool              `json:"holds_secrets"`
	Auto         *AutoCheckpoint   `json:"auto_checkpoint,omitempty"` // the schedule, if there is one
	Receipt      *Receipt          `json:"receipt,omitempty"`
	Timing       Timing            `json:"timing"`
	Usage        *Usage            `json:"usage,omitempty"` // of a living one, by GET of one only
}

// Receipt is the agent's claim of what it made unique in a fork.
type Receipt struct {
	Steps         []ReceiptStep `json:"steps"`
	Generation    uint64        `json:"generation"`
	ClockOffsetMS float64       `json:"clock_offset_ms"`
	DurationMS    float64       `json:"duration_ms"`
	NotCovered    []string      `json:"not_covered"`
}

// ReceiptStep is one item of a receipt.
type ReceiptStep struct {
	Name   string `json:"name"`
	Status string `json:"status"` // done, absent or failed
	Detail string `json:"detail,omitempty"`
}

// Timing is how long the steps of a fork took, each counted from the request.
type Timing struct {
	Pool       string  `json:"pool"` // "none", "blank" or "warm": what was claimed
	StartMS    float64 `json:"start_ms"`
	HelloMS    float64 `json:"hello_ms"`
	IdentityMS float64 `json:"identity_ms"`
	TotalMS    float64 `json:"total_ms"`
}

// Usage is what a sandbox consumes on the host now.
type Usage struct {
	PSSKiB        int64   `json:"pss_kib"`
	PrivateKiB    int64   `json:"private_kib"`
	RSSKiB        int64   `json:"rss_kib"`
	CPUMS         float64 `json:"cpu_ms"`
	DiskBytes     int64   `json:"disk_bytes"`
	GuestPagesKiB int64   `json:"guest_pages_kib"` // pages of the guest's memory copied because they were written
	SharedKiB     int64   `json:"shared_kib"`      // mapped and shared with others
	// LastActivityUnixMS is when it was last asked for something; 0 is unknown.
	LastActivityUnixMS int64 `json:"last_activity_unix_ms"`
}

// CreateSandboxes is the body of POST /v1/sandboxes.
type CreateSandboxes struct {
	SnapshotTag    string `json:"snapshot_tag"` // any reference: tag, id or unique prefix of an id
	N              *int   `json:"n,omitempty"`  // 1 if absent
	MemoryLimitMiB *int   `json:"memory_limit_mib,omitempty"`

	// PerChildNetns and Prewarm ask for what always holds or does no harm here;
	// LiveFork and Hugepages are refused if true.
	PerChildNetns bool `json:"per_child_netns,omitempty"`
	Prewarm       bool `json:"prewarm,omitempty"`
	LiveFork      bool `json:"live_fork,omitempty"`
	Hugepages     bool `json:"hugepages,omitempty"`

	Name    string            `json:"name,omitempty"` // only with n = 1
	Labels  map[string]string `json:"labels,omitempty"`
	Env     map[string]string `json:"env,omitempty"`
	Partial bool              `json:"partial,omitempty"` // keep the good ones if some fail
	// Secrets are environment that is never written, logged or listed; what received
	// any holds_secrets, and copies of it need with_secrets.
	Secrets     map[string]string `json:"secrets,omitempty"`
	Children    []ChildInput      `json:"children,omitempty"`     // one for each child; n may then be absent
	Reseed      string            `json:"reseed,omitempty"`       // all (if absent), system: generators of user space go on, or seed=N: those of child i come from (N, i)
	WithSecrets bool              `json:"with_secrets,omitempty"` // copy a memory that holds secrets
	Engine      string            `json:"engine,omitempty"`
	Cold        bool              `json:"cold,omitempty"` // boot from the snapshot's disk: its memory, which may be stale, is not used
	// Sizes are fixed in the snapshot; if given they must equal its.
	CPUs      int `json:"cpus,omitempty"`
	MemoryMiB int `json:"memory_mib,omitempty"`
	DiskMiB   int `json:"disk_mib,omitempty"`
	// CPULimit, in processors, and PIDsLimit, of processes and threads on the host,
	// bound each sandbox.
	CPULimit  *float64 `json:"cpu_limit,omitempty"`
	PIDsLimit *int     `json:"pids_limit,omitempty"`
	// Wait is how long the call may wait for room, as in "30s"; nothing means that
	// what does not fit fails at once. The query parameter wait does the same.
	Wait string `json:"wait,omitempty"`
}

// ChildInput is what one child gets on top of what all get.
type ChildInput struct {
	Env    map[string]string `json:"env,omitempty"`
	Labels map[string]string `json:"labels,omitempty"`
	// Files and FilesBase64 are written by absolute path, as text or as bytes, before
	// any process of the user goes on; owned by root, mode 0644, 16 MiB together.
	Files       map[string]string `json:"files,omitempty"`
	FilesBase64 map[string][]byte `json:"files_base64,omitempty"`
}

// ForkFailure stands in place of a sandbox that did not come up, in the array of
// a partial create.
type ForkFailure struct {
	Index int `json:"index"`
	Error
}

// ForkLine is one line of a streamed create. Exactly one of these holds:
// Progress is set; Sandbox or Error is set and belongs to child Index; Done is
// true, the line is the last one, and Error if set is that of the whole call.
type ForkLine struct {
	Progress *Progress `json:"progress,omitempty"`
	Index    *int      `json:"index,omitempty"`
	Sandbox  *Sandbox  `json:"sandbox,omitempty"`
	Error    string    `json:"error,omitempty"`
	Code     string    `json:"code,omitempty"`
	Hint     string    `json:"hint,omitempty"`
	Done     bool      `json:"done,omitempty"`
	OK       *int      `json:"ok,omitempty"`
	Failed   *int      `json:"failed,omitempty"`
}

// Exec is the body of POST /v1/sandboxes/{ref}/exec.
type Exec struct {
	Args        []string          `json:"args"`
	TimeoutSecs *float64          `json:"timeout_secs,omitempty"` // 30 if absent
	Env         map[string]string `json:"env,omitempty"`
	Cwd         string            `json:"cwd,omitempty"`
	User        string            `json:"user,omitempty"`
	Stdin       *string           `json:"stdin,omitempty"`
	StdinBase64 []byte            `json:"stdin_base64,omitempty"` // instead of stdin
	OutputLimit int               `json:"output_limit,omitempty"` // bytes of stdout and stderr each
	Checkpoint  bool              `json:"checkpoint,omitempty"`   // make a checkpoint before
}

// ExecResult is the end of a program. Stdout and Stderr are text in which
// invalid UTF-8 is replaced; the exact bytes are then in the Base64 fields.
type ExecResult struct {
	Stdout       string  `json:"stdout"`
	Stderr       string  `json:"stderr"`
	ExitCode     int     `json:"exit_code"` // 128+signal if a signal ended it
	StdoutBase64 []byte  `json:"stdout_base64,omitempty"`
	StderrBase64 []byte  `json:"stderr_base64,omitempty"`
	Signal       int     `json:"signal,omitempty"`
	TimedOut     bool    `json:"timed_out"`
	Truncated    bool    `json:"truncated"`
	OOMKilled    bool    `json:"oom_killed"`
	DurationMS   float64 `json:"duration_ms"`
	CPUMS        float64 `json:"cpu_ms"`
	MaxRSSKiB    int64   `json:"max_rss_kib"`
	CheckpointID string  `json:"checkpoint_id,omitempty"` // made before, as asked
}

// StdoutBytes returns exactly what the program wrote to its standard output.
func (r ExecResult) StdoutBytes() []byte { return exactBytes(r.Stdout, r.StdoutBase64) }

// StderrBytes returns exactly what the program wrote to its standard error.
func (r ExecResult) StderrBytes() []byte { return exactBytes(r.Stderr, r.StderrBase64) }

// Eval is the body of POST /v1/sandboxes/{ref}/eval.
type Eval struct {
	Code        string   `json:"code"`
	TimeoutSecs *float64 `json:"timeout_secs,omitempty"` // 30 if absent
	Language    string   `json:"language,omitempty"`     // python if absent
	OutputLimit int      `json:"output_limit,omitempty"`
}

// EvalResult is the outcome of an eval. An error raised by the code is a result:
// Error is set and ExitCode is 1.
type EvalResult struct {
	Result          *string `json:"result"`
	Error           *string `json:"error"`
	ExitCode        int     `json:"exit_code"`
	Stdout          string  `json:"stdout"`
	Stderr          string  `json:"stderr"`
	StdoutBase64    []byte  `json:"stdout_base64,omitempty"`
	StderrBase64    []byte  `json:"stderr_base64,omitempty"`
	Traceback       string  `json:"traceback,omitempty"`
	TimedOut        bool    `json:"timed_out"`
	Truncated       bool    `json:"truncated"`
	RunnerRestarted bool    `json:"runner_restarted"` // the runner's state is lost
	DurationMS      float64 `json:"duration_ms"`
}

// StdoutBytes returns exactly what the code wrote to standard output.
func (r EvalResult) StdoutBytes() []byte { return exactBytes(r.Stdout, r.StdoutBase64) }

// StderrBytes returns exactly what the code wrote to standard error.
func (r EvalResult) StderrBytes() []byte { return exactBytes(r.Stderr, r.StderrBase64) }

func exactBytes(text string, exact []byte) []byte {
	if len(exact) > 0 {
		return exact
	}
	return []byte(text)
}

// Pong is the answer of POST /v1/sandboxes/{ref}/ping: what the guest's agent
// says of itself.
type Pong struct {
	Pong         bool   `json:"pong"`
	NumpyVersion string `json:"numpy_version"` // "not-installed" if the runner has not imported it
	PID          int    `json:"pid"`
	AgentLang    string `json:"agent_lang"` // first of Runners, or python
	WarmupReady  bool   `json:"warmup_ready"`

	AgentVersion    string   `json:"agent_version"`
	ProtocolVersion int      `json:"protocol_version"`
	WallClockUnixMS int64    `json:"wall_clock_unix_ms"`
	UptimeMS        float64  `json:"uptime_ms"`
	Runners         []string `json:"runners"`
	PythonVersion   string   `json:"python_version,omitempty"`
	Generation      uint64   `json:"generation"`
}
