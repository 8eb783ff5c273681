package sandbox

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"forkd.dev/forkd/internal/engine"
	"forkd.dev/forkd/internal/engine/fake"
	"forkd.dev/forkd/internal/errdefs"
)

// proof is one with a fake engine.
func proof(t *testing.T, cfg fake.Config) (Proof, *fake.Registry) {
	t.Helper()
	cfg.Registry = fake.NewRegistry()
	disk := filepath.Join(t.TempDir(), "disk")
	if err := os.WriteFile(disk, []byte("disk"), 0o600); err != nil {
		t.Fatal(err)
	}
	return Proof{
		Engine: fake.New(cfg), Connect: connectFake, Dir: t.TempDir(), Root: engine.Root{Disk: disk}, Shape: engine.Shape{CPUs: 1, MemoryMiB: 128, DiskMiB: 64},
	}, cfg.Registry
}

func TestProve(t *testing.T) {
	p, host := proof(t, fake.Config{})
	if err := Prove(t.Context(), p); err != nil || len(host.Running()) != 0 {
		t.Errorf("%v, left %v", err, host.Running())
	}
}

// TestProveFails: whatever step fails, the error says so and no machine is left.
func TestProveFails(t *testing.T) {
	for _, op := range []fake.Op{fake.OpBoot, fake.OpRestore, fake.OpLoad, fake.OpDial, fake.OpResume, fake.OpCapture, fake.OpWrite} {
		p, host := proof(t, fake.Config{Fault: func(at fake.Op, _ string) error {
			if at == op {
				return fmt.Errorf("no %s here", op)
			}
			return nil
		}})
		err := Prove(t.Context(), p)
		if !errors.Is(err, errdefs.ErrUnavailable) || !strings.Contains(err.Error(), fmt.Sprintf("no %s here", op)) || len(host.Running()) != 0 {
			t.Errorf("%s: %v, left %v", op, err, host.Running())
		}
	}
	for name, faults := range map[string]fake.GuestFaults{"silent": {HangHello: true}, "dies": {DieAfter: 2}} {
		ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
		p, host := proof(t, fake.Config{Guest: func(string) fake.GuestFaults { return faults }})
		if err := Prove(ctx, p); !errors.Is(err, errdefs.ErrUnavailable) || len(host.Running()) != 0 {
			t.Errorf("%s: %v, left %v", name, err, host.Running())
		}
		cancel()
	}
}
