package kvm

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"forkd.dev/forkd/internal/engine"
	"forkd.dev/forkd/internal/errdefs"
)

// File names inside a machine's directory.
const (
	recordFile    = "machine.json"
	controlSocket = "control.sock"
	agentSocket   = "agent.sock"
	logFile       = "vmm.log"     // what the monitor itself says
	consoleFile   = "console.log" // what the guest's kernel prints
)

// record is machine.json: what Adopt needs to know.
type record struct {
	Version  int          `json:"version"`
	ID       string       `json:"id"`
	PID      int          `json:"pid"`
	Start    uint64       `json:"start"`
	BootID   string       `json:"boot_id"`
	UID      int          `json:"uid"`
	Token    string       `json:"token"` // of a process that was blank; "" else
	Shape    engine.Shape `json:"shape"`
	MappedID string       `json:"mapped_snapshot"` // whose memory file it maps; "" after a boot
	ForkedID string       `json:"forked_snapshot"` // it was restored from; "" after a boot
	Overlays []string     `json:"overlays"`        // its own disk files, topmost last
	Captures []mark       `json:"captures"`        // that were stored since, oldest first
	// LostParent: one of them was deleted, so that the monitor's idea of the parent is not
	// ours any more.
	LostParent bool `json:"lost_parent,omitempty"`
}

const recordVersion = 1

// mark is a stored capture: it holds the lowest Overlays of the machine's overlays.
type mark struct {
	Snapshot string `json:"snapshot"`
	Overlays int    `json:"overlays"`
}

func writeRecord(dir string, rec record) error {
	b, err := json.Marshal(rec)
	if err != nil {
		return err
	}
	tmp := filepath.Join(dir, recordFile+".tmp")
	if err := os.WriteFile(tmp, b, 0o600); err != nil {
		return fmt.Errorf("write machine record: %w", err)
	}
	if err := os.Rename(tmp, filepath.Join(dir, recordFile)); err != nil {
		return fmt.Errorf("write machine record: %w", err)
	}
	return nil
}

func readRecord(dir string) (record, error) {
	b, err := os.ReadFile(filepath.Join(dir, recordFile))
	if errors.Is(err, fs.ErrNotExist) {
		return record{}, errdefs.New(errdefs.ErrNotFound, "%s has no machine record", dir)
	}
	if err != nil {
		return record{}, fmt.Errorf("read machine record: %w", err)
	}
	var rec record
	if err := json.Unmarshal(b, &rec); err != nil {
		return record{}, errdefs.New(errdefs.ErrCorrupt, "machine record in %s: %v", dir, err)
	}
	if rec.Version != recordVersion {
		return record{}, errdefs.New(errdefs.ErrIncompatible, "machine record in %s has version %d, want %d", dir, rec.Version, recordVersion)
	}
	return rec, nil
}
