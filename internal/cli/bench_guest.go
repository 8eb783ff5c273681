package cli

import (
	"context"
	"errors"
	"slices"

	"github.com/spf13/cobra"

	"forkd.dev/forkd/internal/bench"
	"forkd.dev/forkd/internal/errdefs"
	forkd "forkd.dev/forkd/sdk/go"
)

func (a *app) benchGuestCommand() *cobra.Command {
	var o bench.GuestOptions
	var out string
	var only []string
	cmd := &cobra.Command{
		Use:   "guest",
		Short: "Measure user code in a fork of each engine that works here, next to the same code natively",
		Long: "Run one script in forks and, in turn with them, natively with the files of the same image: arithmetic, numpy, JSON, system\n" +
			"calls, files, subprocesses, memory, a new interpreter. For each engine a private daemon is started; where a daemon\n" +
			"runs already, only its engine is measured. Native runs need root on this host. Measure on a quiet machine.\n" +
			"Ends with exit code 4 if an answer is wrong or missing.",
		Example: "  forkd bench guest --runs 5 --out bench/results\n  forkd bench guest --engines gvisor --json",
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := o.Validate(); err != nil {
				return err
			}
			p := a.progress()
			cfg := bench.Config{Progress: p.step, Command: commandLine(cmd), TempDir: a.env.Getenv("TMPDIR")}
			defer p.done()
			engines, skipped, err := a.benchEngines(cmd.Context(), only)
			if err != nil {
				return err
			}
			return writeBench(a, captureBench[bench.GuestReport]{
				text: bench.WriteGuestMarkdown, charts: bench.GuestCharts, out: out,
				name: func(*bench.GuestReport) string { return "guest" },
			}, func() (*bench.GuestReport, error) {
				r, err := bench.Guest(cmd.Context(), cfg, engines, o)
				if r != nil {
					r.Skipped = append(r.Skipped, skipped...)
				}
				p.done()
				return r, err
			})
		},
	}
	fl := cmd.Flags()
	fl.StringVarP(&o.Snapshot, "tag", "t", builtin, "the snapshot to fork; it needs Python and numpy")
	fl.IntVar(&o.Runs, "runs", 3, "forks of each engine, and native runs (at least 5 for figures to publish)")
	fl.IntVar(&o.Rounds, "rounds", 2, "rounds of each work in a run; the best counts")
	fl.StringSliceVar(&only, "engines", nil, "the engines to measure, e.g. qemu,gvisor; all that work if absent")
	outFlag(cmd, &out)
	return cmd
}

// benchEngines lists what can be measured, and why the others cannot.
func (a *app) benchEngines(ctx context.Context, only []string) ([]bench.GuestEngine, []bench.GuestSkip, error) {
	running, err := a.engineThatRuns(ctx)
	if err != nil {
		return nil, nil, err
	}
	if a.env.Engines == nil {
		return nil, nil, absent("bench guest")
	}
	list, err := a.env.Engines(ctx, "")
	if err != nil {
		return nil, nil, err
	}
	var out []bench.GuestEngine
	var skipped []bench.GuestSkip
	skip := func(engine, why string) { skipped = append(skipped, bench.GuestSkip{Engine: engine, Why: why}) }
	known := map[string]bool{}
	for _, e := range slices.Backward(list.Engines) { // the first has the image's disk, for the native runs
		known[e.Name] = true
		switch {
		case len(only) > 0 && !slices.Contains(only, e.Name):
			skip(e.Name, "not asked for")
		case running != "" && running != e.Name:
			skip(e.Name, "a daemon of engine "+running+" runs")
		case !e.Available && running != e.Name:
			skip(e.Name, e.Reason)
		default:
			out = append(out, bench.GuestEngine{Name: e.Name, Version: e.Version, Open: a.openEngine(e.Name)})
		}
	}
	for _, name := range only {
		if !known[name] {
			return nil, nil, errdefs.WithHint(errdefs.New(errdefs.ErrInvalid, "there is no engine %.40q", name), "forkd engine ls lists them")
		}
	}
	return out, skipped, nil
}

// engineThatRuns is the engine of the daemon that answers, or "".
func (a *app) engineThatRuns(ctx context.Context) (string, error) {
	c, err := a.client()
	if err != nil {
		return "", err
	}
	defer c.Close()
	v, err := c.Version(ctx)
	if errors.Is(err, forkd.ErrNoDaemon) && a.config.Text("url") == "" {
		return "", nil
	}
	return v.Engine, err
}

// openEngine connects to the daemon that runs, or starts a private one.
func (a *app) openEngine(name string) func(ctx context.Context) (*forkd.Client, func() error, error) {
	return func(ctx context.Context) (*forkd.Client, func() error, error) {
		running, err := a.engineThatRuns(ctx)
		if err != nil {
			return nil, nil, err
		}
		if running != "" {
			c, err := a.client()
			return c, func() error { return nil }, err
		}
		if a.env.StartPrivateDaemon == nil {
			return nil, nil, absent("a private daemon")
		}
		return a.startPrivate(ctx, name)
	}
}
