// Package systemd holds forkd's unit file, for `forkd service install`.
package systemd

import _ "embed"

// Unit is forkd.service, for a forkd in [Binary] with its data in [DataDir].
//
//go:embed forkd.service
var Unit string

// The paths that stand in Unit.
const (
	Binary  = "/usr/local/bin/forkd"
	DataDir = "/var/lib/forkd"
)
