package cli

import (
	"context"
	"errors"
	"os"
	"os/signal"
	"syscall"

	"github.com/spf13/cobra"

	"forkd.dev/forkd/internal/config"
	"forkd.dev/forkd/internal/engine/selection"
	"forkd.dev/forkd/internal/errdefs"
	forkd "forkd.dev/forkd/sdk/go"
)

// app is one run of the command line.
type app struct {
	env Env

	// Set by the global flags.
	json  bool
	quiet bool

	config *config.Config // set before a command runs

	stops []func() error // private daemons to stop at the end
	// started: parsing is over, so errors from here on are not of usage.
	started bool
}

// Run runs the command line args (without the program's name) and returns the
// exit code. SIGINT and SIGTERM cancel what runs; a second one kills.
func Run(ctx context.Context, args []string, env Env) int {
	ctx, stop := signal.NotifyContext(ctx, os.Interrupt, syscall.SIGTERM)
	defer stop()
	context.AfterFunc(ctx, stop)

	a := &app{env: env.withDefaults()}
	root := a.root()
	root.SetArgs(args)
	cmd, err := root.ExecuteContextC(ctx)
	if err != nil && !a.started {
		err = usage(cmd, err)
	}
	err = a.after(a.stopDaemons(), err)
	if err != nil {
		a.report(err)
	}
	return exitCode(ctx, cmd, err)
}

// usage gives an error of parsing its class and points to the help.
func usage(cmd *cobra.Command, err error) error {
	if cmd.Annotations[ownFailure] != "" {
		return errdefs.WithHint(errdefs.As(errdefs.ErrInvalid, err), "write: forkd %s; flags of the program come after the --", cmd.Use)
	}
	return errdefs.WithHint(errdefs.As(errdefs.ErrInvalid, err), "see: %s --help", cmd.CommandPath())
}

func (a *app) root() *cobra.Command {
	root := &cobra.Command{
		Use:           "forkd",
		Short:         "Real Linux VMs that fork like processes",
		Long:          "forkd runs code of AI agents in real Linux VMs that can be forked copy-on-write:\none parent boots and warms up, then every fork starts from its memory.",
		SilenceErrors: true,
		SilenceUsage:  true,
		Args:          cobra.NoArgs,
		PersistentPreRunE: func(cmd *cobra.Command, _ []string) error {
			a.started = true
			return a.loadConfig(cmd)
		},
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	root.SetIn(a.env.Stdin)
	root.SetOut(a.env.Stdout)
	root.SetErr(a.env.Stderr)
	f := root.PersistentFlags()
	registerSettings(f, config.Client)
	f.BoolVar(&a.json, "json", false, "print the result as JSON")
	f.BoolVarP(&a.quiet, "quiet", "q", false, "print only ids, and no progress")
	_ = f.MarkHidden("daemon-token") // it exists
	root.AddCommand(
		a.doctorCommand(), a.serveCommand(), a.cleanupCommand(), a.versionCommand(), a.engineCommand(), a.configCommand(), a.serviceCommand(),
		a.forkCommand(), a.lsCommand(), a.killCommand(), a.execCommand(), a.evalCommand(), a.pingCommand(),
		a.runCommand(), a.demoCommand(), a.benchCommand(),
		a.snapshotCommand(), a.imageCommand(), a.kernelCommand(), a.branchCommand(),
		a.verifyCommand(), a.dfCommand(), a.pruneCommand(), a.packCommand(), a.unpackCommand(),
		a.checkpointCommand(), a.checkpointsCommand(), a.rollbackCommand(), a.treeCommand(), a.diffCommand(),
		a.poolCommand(), a.logsCommand(), a.statsCommand(),
	)
	root.AddCommand(a.aliasCommands()...)
	a.completeArguments(root)
	return root
}

// client returns a client of the daemon that is there.
func (a *app) client() (*forkd.Client, error) {
	if a.env.FindDaemon != nil && a.config.Text("url") == "" {
		return a.env.FindDaemon()
	}
	return forkd.New(forkd.Options{BaseURL: a.config.Text("url"), Token: a.config.Text("token"), Getenv: a.env.Getenv})
}

// clientOrPrivate returns a client of the daemon that is there or, if none is and
// none was asked for, of a private one that ends with this command.
func (a *app) clientOrPrivate(ctx context.Context) (*forkd.Client, error) {
	c, err := a.client()
	if err != nil {
		return nil, err
	}
	err = c.Health(ctx)
	if err == nil {
		return c, a.checkEngine(ctx, c)
	}
	asked := a.config.Text("url") != ""
	if asked || !errors.Is(err, forkd.ErrNoDaemon) || a.env.StartPrivateDaemon == nil {
		return c, err
	}
	c, stop, err := a.startPrivate(ctx, a.config.Text("engine"))
	if err != nil {
		return nil, err
	}
	a.stops = append(a.stops, stop)
	return c, nil
}

// startPrivate starts a private daemon with an engine. stop ends it.
func (a *app) startPrivate(ctx context.Context, engine string) (c *forkd.Client, stop func() error, err error) {
	p := a.progress()
	p.step("starting a private daemon", -1)
	socket, stop, err := a.env.StartPrivateDaemon(ctx, engine)
	p.done()
	if err != nil {
		return nil, nil, err
	}
	c, err = forkd.New(forkd.Options{Socket: socket, Getenv: a.env.Getenv})
	return c, stop, err
}

// checkEngine refuses a daemon that runs another engine than --engine asks for.
func (a *app) checkEngine(ctx context.Context, c *forkd.Client) error {
	asked := a.config.Text("engine")
	if asked == "" || asked == selection.Auto || a.config.Origin("engine") != config.FromFlag {
		return nil
	}
	v, err := c.Version(ctx)
	if err != nil || v.Engine == asked {
		return err
	}
	return errdefs.WithHint(errdefs.New(errdefs.ErrConflict, "the daemon at %s runs engine %s, not %s", c.Target(), v.Engine, asked),
		"stop it, or start another with: forkd serve --engine %s --data-dir DIR --bind 127.0.0.1:PORT, and name it with FORKD_URL", asked)
}

func (a *app) stopDaemons() error {
	var errs []error
	for _, stop := range a.stops {
		if err := stop(); err != nil {
			errs = append(errs, errdefs.New(errdefs.ErrInternal, "stop private daemon: %w", err))
		}
	}
	a.stops = nil
	return errors.Join(errs...)
}
