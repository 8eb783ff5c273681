package qemu

import (
	"encoding/binary"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"forkd.dev/forkd/internal/engine"
	"forkd.dev/forkd/internal/ident"
)

// TestCheckState: a disk layer of our own passes; one that names other files does not.
func TestCheckState(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "layer-000.qcow2")
	if err := createOverlay(path, 64<<20); err != nil {
		t.Fatal(err)
	}
	good, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	state := engine.State{ID: ident.New(ident.Snapshot), Dir: dir, Artifacts: []engine.Artifact{{Name: "layer-000.qcow2", Kind: kindDisk, Format: formatQcow2}}}
	shape := engine.Shape{CPUs: 1, MemoryMiB: 128, DiskMiB: 64}
	d := &Driver{}
	if err := d.CheckState(state, shape); err != nil {
		t.Errorf("our own: %v", err)
	}
	be := binary.BigEndian
	for name, c := range map[string]struct {
		change func(b []byte) []byte
		want   string
	}{
		"backing file":  {func(b []byte) []byte { be.PutUint64(b[8:], 512); be.PutUint32(b[16:], 11); return b }, "backing file"},
		"external data": {func(b []byte) []byte { be.PutUint64(b[72:], 4); return b }, "external data"},
		"raw":           {func(b []byte) []byte { b[0] = 0; return b }, "no qcow2"},
		"other size":    {func(b []byte) []byte { be.PutUint64(b[24:], 1<<40); return b }, "not 67108864"},
		"encrypted":     {func(b []byte) []byte { be.PutUint32(b[32:], 1); return b }, "encrypted"},
		"snapshots":     {func(b []byte) []byte { be.PutUint32(b[60:], 3); return b }, "3 snapshots"},
		"old":           {func(b []byte) []byte { be.PutUint32(b[4:], 2); return b }, "version 3"},
		"short":         {func(b []byte) []byte { return b[:50] }, "EOF"},
	} {
		if err := os.WriteFile(path, c.change(append([]byte(nil), good...)), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := d.CheckState(state, shape); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v, want %q", name, err, c.want)
		}
	}
	state.Artifacts[0].Format = "raw"
	if err := d.CheckState(state, shape); err == nil || !strings.Contains(err.Error(), "format") {
		t.Errorf("a raw disk: %v", err)
	}
}
