package fake

import (
	"context"
	"net"
	"os"
	"path/filepath"
	"testing"
	"time"

	"forkd.dev/forkd/internal/agentwire"
	"forkd.dev/forkd/internal/engine"
	"forkd.dev/forkd/internal/engine/enginetest"
	"forkd.dev/forkd/internal/errdefs"
)

// guest makes an Agent an enginetest.Guest.
type guest struct{ *Agent }

func (g guest) Ping(ctx context.Context) error {
	_, err := g.Agent.Ping(ctx)
	return err
}

func (g guest) Now(ctx context.Context) (time.Time, error) {
	pong, err := g.Agent.Ping(ctx)
	return pong.WallClock, err
}

func (g guest) Set(ctx context.Context, name, value string) error {
	_, err := g.Eval(ctx, agentwire.EvalRequest{Code: name + "=" + value})
	return err
}

func (g guest) Get(ctx context.Context, name string) (string, error) {
	res, err := g.Eval(ctx, agentwire.EvalRequest{Code: name})
	if err == nil && res.Error != "" {
		err = errdefs.New(errdefs.ErrNotFound, "%s", res.Error)
	}
	return res.Result, err
}

func (g guest) WriteFile(ctx context.Context, path, text string) error {
	_, err := g.Exec(ctx, agentwire.ExecRequest{Argv: []string{"write", path, text}})
	return err
}

func (g guest) ReadFile(ctx context.Context, path string) (string, error) {
	res, err := g.Exec(ctx, agentwire.ExecRequest{Argv: []string{"cat", path}})
	return string(res.Stdout), err
}

func TestConformance(t *testing.T) {
	dir := t.TempDir()
	disk := filepath.Join(dir, "disk")
	if err := os.WriteFile(disk, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	host := NewRegistry()
	enginetest.Run(t, enginetest.Harness{
		Open:  func(testing.TB) engine.Driver { return New(Config{Registry: host, Installation: "test"}) },
		Dir:   dir,
		Root:  engine.Root{Disk: disk},
		Shape: engine.Shape{CPUs: 1, MemoryMiB: 16, DiskMiB: 16},
		Connect: func(ctx context.Context, conn net.Conn) (enginetest.Guest, error) {
			a, err := Connect(ctx, conn)
			if err != nil {
				return nil, err
			}
			return guest{a}, nil
		},
		Start: func(ctx context.Context, g enginetest.Guest) error {
			a := g.(guest)
			if err := a.Boot(ctx, agentwire.BootConfig{Hostname: "forkd", HostTime: time.Now()}); err != nil {
				return err
			}
			_, err := a.WarmStart(ctx, "python", "")
			return err
		},
		Crash: func(t testing.TB, m engine.Machine) {
			if !host.Crash(m.ID(), "its process ended: signal: killed") {
				t.Errorf("machine %s does not run", m.ID())
			}
		},
	})
	if ids := host.Running(); len(ids) > 0 {
		t.Errorf("machines are left: %v", ids)
	}
}
