package gvisor

import (
	"forkd.dev/forkd/internal/engine"
	"forkd.dev/forkd/internal/errdefs"
)

// Name is the engine's name in the API and in manifests.
const Name = "gvisor"

// Config is what a Driver needs.
type Config struct {
	// Dir belongs to the driver; it exists.
	Dir string
	// Installation qualifies the ids that runsc knows, so that several data
	// directories on one host do not touch each other's machines. [a-z0-9]+.
	Installation string
	// Runsc is the program, as FindRunsc returned it.
	Runsc string
	// Agent is the static forkd-agent program.
	Agent []byte
	// Log receives what happens in the background; nil drops it.
	Log func(format string, args ...any)
}

// New returns a driver for this host. It fails with ErrUnavailable if runsc is
// missing, broken or too old.
func New(cfg Config) (engine.Driver, error) {
	if _, err := checkRunsc(cfg.Runsc); err != nil {
		return nil, err
	}
	return nil, errdefs.New(errdefs.ErrUnsupported, "engine %s cannot run sandboxes yet", Name)
}
