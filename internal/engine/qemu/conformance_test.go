package qemu

import (
	"context"
	"os"
	"path/filepath"
	"testing"

	"forkd.dev/forkd/internal/engine"
	"forkd.dev/forkd/internal/engine/enginetest"
	"forkd.dev/forkd/internal/ident"
	"forkd.dev/forkd/test/realguest"
)

// TestConformance runs the suite on real machines: QEMU, Debian's kernel, our agent.
func TestConformance(t *testing.T) {
	realguest.Need(t, "qemu-system-x86_64", "mmdebstrap")
	dir := t.TempDir()
	driverDir := filepath.Join(dir, "driver")
	if err := os.Mkdir(driverDir, 0o711); err != nil {
		t.Fatal(err)
	}
	installation := ident.New(ident.Sandbox)[2:] // another run on this host is another one
	h := realguest.Harness(t, func(t testing.TB) engine.Driver {
		d, err := New(context.Background(), Config{Dir: driverDir, Installation: installation, Log: t.Logf})
		if err != nil {
			t.Fatal(err)
		}
		return d
	})
	h.Inspect = inspectProcess
	enginetest.Run(t, h)
}
