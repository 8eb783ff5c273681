// Package rest is the wire contract of forkd's REST API: openapi.yaml and the Go
// types of its bodies, shared by the server (internal/frontend/rest) and the
// client (sdk/go).
//
// The API is a superset of the one that upstream forkd 0.5 serves, so its
// published SDKs work unchanged: fields and codes of theirs keep their meaning,
// ours are added beside them (docs/compat.md). Fields are never removed or given
// another meaning within /v1; unknown fields of a request are ignored.
//
// Times of day are Unix seconds, durations are milliseconds with fractions, sizes
// carry their unit in the name.
package rest

import _ "embed"

// OpenAPI is the API's description in OpenAPI 3.1, as served at /v1/openapi.yaml.
//
//go:embed openapi.yaml
var OpenAPI []byte

// Media types and headers of the API.
const (
	JSON           = "application/json"
	NDJSON         = "application/x-ndjson"
	Tar            = "application/x-tar"
	IdempotencyKey = "Idempotency-Key"
	RequestID      = "X-Request-Id"
)

// RequestEntry is the first entry of an archive that carries a request and files.
const RequestEntry = "request.json"

// Error is the body of every answer that is not a success, and the last line of
// a stream that failed.
type Error struct {
	Error string `json:"error"`          // what happened, to which object
	Code  string `json:"code"`           // class, one of docs/errors.md
	Hint  string `json:"hint,omitempty"` // what to do about it
}

// Progress is what a long operation is doing; Fraction is negative if unknown.
type Progress struct {
	Step     string  `json:"step"`
	Fraction float64 `json:"fraction"`
}

// Version is the answer of GET /version.
type Version struct {
	Version string `json:"version"`
	API     string `json:"api"`
	Engine  string `json:"engine,omitempty"` // that the daemon runs
}

// Health is the answer of GET /healthz.
type Health struct {
	OK bool `json:"ok"`
}
