package daemon

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"time"

	"forkd.dev/forkd/internal/buildnet"
	"forkd.dev/forkd/internal/engine"
	"forkd.dev/forkd/internal/engine/gvisor"
	"forkd.dev/forkd/internal/errdefs"
	"forkd.dev/forkd/internal/guest"
	"forkd.dev/forkd/internal/image"
	"forkd.dev/forkd/internal/programs"
	"forkd.dev/forkd/internal/sandbox"
	"forkd.dev/forkd/internal/store/metadata"
	"forkd.dev/forkd/internal/store/snapshot"
)

// poolSize is how many prepared processes a daemon keeps for each snapshot in
// use. Each owns about 17 MiB and no CPU.
const poolSize = 8

// parts is everything a daemon is made of, in the order in which it is opened.
type parts struct {
	journal *metadata.DB
	engine  engine.Driver
	images  *image.Store
	store   *snapshot.Store
	service *sandbox.Service
}

func openParts(ctx context.Context, o Options, log *slog.Logger) (_ *parts, err error) {
	agent, err := programs.Agent()
	if err != nil {
		return nil, err
	}
	p := &parts{}
	defer func() {
		if err != nil {
			closeCtx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
			defer cancel()
			err = errors.Join(err, p.close(closeCtx))
		}
	}()
	if p.journal, err = openJournal(ctx, o, log); err != nil {
		return nil, err
	}
	logf := func(format string, args ...any) { log.Info(fmt.Sprintf(format, args...)) }
	if p.engine, err = openEngine(ctx, o, p.journal, logf); err != nil {
		return nil, err
	}
	dir := func(name string) string { return filepath.Join(o.DataDir, name) }
	p.images, err = image.New(image.Config{
		Dir: dir("images"), CacheDir: dir("cache"), KernelDir: dir("kernels"), InitramfsDir: dir("initramfs"),
		Agent: agent, Log: logf, Trees: p.engine.Name() == gvisor.Name,
	})
	if err != nil {
		return nil, err
	}
	if p.store, err = snapshot.Open(snapshot.Config{Dir: dir("snapshots")}); err != nil {
		return nil, err
	}
	cfg := sandbox.Config{
		BuildNet: registries,
		Dir:      dir("sandboxes"), LogDir: dir("logs"), Engine: p.engine, Images: p.images, Kernels: p.images, Store: p.store, Journal: p.journal,
		Connect: connect, AgentBuild: programs.Digest(agent), MaxSandboxes: o.MaxSandboxes, PoolSize: poolSize, Log: logf,
	}
	if o.Private {
		cfg.Session, cfg.PoolSize = fmt.Sprintf("private-%d", os.Getpid()), 0
	}
	if cfg.MemoryBudgetMiB, err = memoryBudget(o.MemoryBudget); err != nil {
		return nil, err
	}
	cfg.MinFreeBytes = minFree(o.MinFreeMiB)
	p.service, err = sandbox.New(ctx, cfg)
	return p, err
}

// openEngine starts the engine that is to run sandboxes here.
func openEngine(ctx context.Context, o Options, db *metadata.DB, logf func(string, ...any)) (engine.Driver, error) {
	resident, err := residentMax(o.ResidentMax)
	if err != nil {
		return nil, err
	}
	all := newEngines(o.DataDir)
	inUse, err := all.running(ctx, db, logf)
	if err != nil {
		return nil, err
	}
	name, reason, err := all.pick(ctx, o.Engine, inUse)
	if err != nil {
		return nil, err
	}
	logf("engine %s: %s", name, reason)
	if err := all.reapOthers(ctx, name, db, logf); err != nil {
		return nil, err
	}
	return all.open(ctx, name, engineSetup{installation: db.Installation(), residentMaxBytes: resident, logf: logf})
}

// openJournal opens the journal; a private daemon waits until another one has
// given the data directory back.
func openJournal(ctx context.Context, o Options, log *slog.Logger) (*metadata.DB, error) {
	retry := time.NewTicker(200 * time.Millisecond)
	defer retry.Stop()
	for waited := false; ; waited = true {
		db, err := metadata.Open(ctx, metadata.Config{Dir: o.DataDir})
		if err == nil || !o.Private || !errors.Is(err, errdefs.ErrConflict) {
			return db, err
		}
		if !waited {
			log.Info("waiting for the data directory", "why", err)
		}
		select {
		case <-retry.C:
		case <-ctx.Done():
			return nil, err
		}
	}
}

// close closes the parts in reverse order.
func (p *parts) close(ctx context.Context) error {
	var errs []error
	if p.service != nil {
		errs = append(errs, p.service.Close(ctx))
	}
	if p.engine != nil {
		errs = append(errs, p.engine.Close())
	}
	if p.journal != nil {
		errs = append(errs, p.journal.Close())
	}
	return errors.Join(errs...)
}

// registries reads how this host reaches package registries.
func registries() buildnet.Settings {
	return buildnet.Detect(buildnet.Source{Glob: filepath.Glob, AptSources: image.HostSources()})
}

// connect says hello to an agent.
func connect(ctx context.Context, conn net.Conn) (sandbox.Agent, error) {
	c, err := guest.Connect(ctx, conn, guest.Options{})
	if err != nil {
		return nil, err // not a nil *Client in an interface
	}
	return c, nil
}
