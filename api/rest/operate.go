package rest

// Pool is the pools of a snapshot.
type Pool struct {
	SnapshotID string   `json:"snapshot_id"`
	Tags       []string `json:"tags"`
	Warm       int      `json:"warm"`             // how many are wanted
	Ready      int      `json:"ready"`            // how many can be claimed now
	Reason     string   `json:"reason,omitempty"` // why it is not being filled
	Blank      int      `json:"blank"`            // how many blank machines are kept once it is forked
	BlankReady int      `json:"blank_ready"`
}

// SetPool is the body of PUT /v1/snapshots/{ref}/pool; 0 ends the pool. What is
// absent stays, one must be there.
type SetPool struct {
	Warm  *int `json:"warm,omitempty"`  // survives restarts
	Blank *int `json:"blank,omitempty"` // until the daemon ends; -1 is its default
}

// Stat is one living sandbox with its usage.
type Stat struct {
	ID            string `json:"id"`
	Name          string `json:"name,omitempty"`
	SnapshotTag   string `json:"snapshot_tag"`
	State         string `json:"state"`
	CreatedAtUnix int64  `json:"created_at_unix"`
	Usage         Usage  `json:"usage"`
}

// Text is the media type of logs.
const Text = "text/plain; charset=utf-8"
