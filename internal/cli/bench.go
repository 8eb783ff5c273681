package cli

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"forkd.dev/forkd/internal/bench"
	"forkd.dev/forkd/internal/errdefs"
)

func (a *app) benchCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "bench",
		Short: "Measure forks, rollouts, branches, rollbacks and user code on this machine",
		Long:  "Measure from the caller's side, next to baselines on the same machine.\nIf no daemon runs, a private one is started for this time. Measure on a quiet machine.",
		Args:  cobra.NoArgs,
		RunE:  func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	cmd.AddCommand(a.benchForkCommand(), a.benchRolloutsCommand(),
		a.benchBranchCommand(), a.benchRollbackCommand(), a.benchChainCommand(), a.benchSearchCommand())
	for _, sub := range cmd.Commands() {
		engineFlag(sub)
	}
	cmd.AddCommand(a.benchGuestCommand()) // which measures all of them
	cmd.AddCommand(a.benchVMMCommand())   // which measures none
	return cmd
}

// benchForkFlags are the flags of bench fork.
type benchForkFlags struct {
	o      bench.ForkOptions
	n      int
	memory mib
	pool   string
	out    string
}

func (a *app) benchForkCommand() *cobra.Command {
	var f benchForkFlags
	cmd := &cobra.Command{
		Use:   "fork",
		Short: "Measure forks from the request to the first answer of each guest",
		Long: "Fork N sandboxes at once and ask the warm interpreter of each as soon as it is up. In turn with it run N plain\n" +
			"processes and N runc containers that do the same with the same files, and once a cold boot of the same machine.\n" +
			"Ends with exit code 4 if an answer is wrong or missing.",
		Example: "  forkd bench fork -n 100 --runs 5 --pool warm --out bench/results\n  forkd bench fork --sweep 1,10,50,100 --json",
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			f.o.MemoryMiB, f.o.Pool = int(f.memory), bench.Pool(f.pool)
			if len(f.o.Counts) == 0 {
				f.o.Counts = []int{f.n}
			} else if cmd.Flags().Changed("count") {
				return errdefs.New(errdefs.ErrInvalid, "--count and --sweep are both given: use one of them")
			}
			if err := f.o.Validate(); err != nil {
				return err
			}
			return a.benchFork(cmd.Context(), f, commandLine(cmd))
		},
	}
	fl := cmd.Flags()
	fl.IntVarP(&f.n, "count", "n", 100, "number of forks at once")
	fl.StringVarP(&f.o.Snapshot, "tag", "t", builtin, "the snapshot to fork; it needs Python and numpy")
	fl.IntVar(&f.o.Runs, "runs", 1, "repeat and report medians (at least 5 for figures to publish)")
	fl.IntSliceVar(&f.o.Counts, "sweep", nil, "several numbers of forks, e.g. 1,10,50,100")
	fl.Var(&f.memory, "memory", "memory of the machines; a snapshot of that size is made for the measurement")
	fl.StringVar(&f.pool, "pool", string(bench.PoolNone), "prepared machines to claim: warm, blank or none")
	fl.StringSliceVar(&f.o.Baselines, "baselines", []string{bench.BaselineProcess, bench.BaselineRunc, bench.BaselineColdBoot}, "what to compare with")
	fl.StringVar(&f.out, "out", "", "directory for JSON, Markdown and charts, e.g. bench/results")
	return cmd
}

func (a *app) benchRolloutsCommand() *cobra.Command {
	var o bench.RolloutOptions
	var out string
	cmd := &cobra.Command{
		Use:   "rollouts",
		Short: "Measure a loop of fork, eval and kill, and look for leaks",
		Long: "Fork a sandbox, ask its warm interpreter, end it, and so on, some at a time. Then compare what the daemon holds\n" +
			"(processes, descriptors, memory files, cgroups, directories, memory) with what it held before.\n" +
			"Ends with exit code 4 if an answer is wrong or missing, 1 if something is left behind.",
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := o.Validate(); err != nil {
				return err
			}
			return a.benchRollouts(cmd.Context(), o, out, commandLine(cmd))
		},
	}
	fl := cmd.Flags()
	fl.IntVarP(&o.Count, "count", "n", 2000, "number of rollouts")
	fl.IntVarP(&o.Concurrency, "concurrency", "c", 4, "how many at a time")
	fl.StringVarP(&o.Snapshot, "tag", "t", builtin, "the snapshot to fork; it needs Python and numpy")
	fl.StringVar(&out, "out", "", "directory for JSON, Markdown and charts, e.g. bench/results")
	return cmd
}

func (a *app) benchRollouts(ctx context.Context, o bench.RolloutOptions, out, command string) error {
	cfg, done, err := a.measuring(ctx, command)
	if err != nil {
		return err
	}
	report, err := bench.Rollouts(ctx, cfg, o)
	done()
	if report == nil {
		return err
	}
	var text bytes.Buffer
	if err := bench.WriteRolloutMarkdown(&text, report); err != nil {
		return err
	}
	name := fmt.Sprintf("rollouts-%s-c%d", report.Engine, o.Concurrency)
	draw := func() (map[string][]byte, error) { return bench.RolloutCharts(report) }
	return a.benchDone(outcomeOf{report, text.String(), out, name, draw}, err)
}

// commandLine is what was typed, as far as it matters for a result.
func commandLine(cmd *cobra.Command) string {
	line := cmd.CommandPath()
	for _, name := range []string{"count", "sweep", "tag", "runs", "memory", "pool", "baselines", "concurrency",
		"mode", "dirty", "children", "freeze", "full", "pages", "checkpoints", "depth", "layer", "branching", "cold", "rounds", "engine", "engines"} {
		if f := cmd.Flags().Lookup(name); f != nil && f.Changed {
			line += fmt.Sprintf(" --%s %s", name, strings.Trim(f.Value.String(), "[]"))
		}
	}
	return line
}

// measuring returns the config of a measurement, and what ends its progress line.
func (a *app) measuring(ctx context.Context, command string) (bench.Config, func(), error) {
	c, err := a.clientOrPrivate(ctx)
	if err != nil {
		return bench.Config{}, nil, err
	}
	p := a.progress()
	return bench.Config{Client: c, Progress: p.step, Command: command, TempDir: a.env.Getenv("TMPDIR")}, p.done, nil
}

func (a *app) benchFork(ctx context.Context, f benchForkFlags, command string) error {
	cfg, done, err := a.measuring(ctx, command)
	if err != nil {
		return err
	}
	reports, err := bench.Fork(ctx, cfg, f.o)
	done()
	if len(reports) == 0 {
		return err
	}
	var result any = reports
	name := fmt.Sprintf("fork-%s-%s-sweep", reports[0].Engine, f.o.Pool)
	if len(reports) == 1 {
		result = reports[0]
		name = fmt.Sprintf("fork-%s-%s-n%d", reports[0].Engine, f.o.Pool, reports[0].N)
	}
	if f.memory != 0 {
		name += fmt.Sprintf("-%dMiB", int(f.memory))
	}
	var text bytes.Buffer
	if err := bench.WriteForkMarkdown(&text, reports); err != nil {
		return err
	}
	draw := func() (map[string][]byte, error) { return bench.ForkCharts(reports) }
	return a.benchDone(outcomeOf{result, text.String(), f.out, name, draw}, err)
}

// outcomeOf is what a measurement gave.
type outcomeOf struct {
	result any
	text   string
	dir    string // to write it to, or ""
	name   string // of the files
	charts func() (map[string][]byte, error)
}

// benchDone prints a result, writes it to files if asked for, and turns the error
// of the measurement into that of the command.
func (a *app) benchDone(o outcomeOf, failure error) error {
	if a.json {
		if err := a.printJSON(o.result); err != nil {
			return err
		}
	} else if _, err := fmt.Fprint(a.env.Stdout, o.text); err != nil {
		return err
	}
	if errors.Is(failure, bench.ErrAnswers) {
		return &codeError{code: exitPartial, err: failure}
	}
	if failure != nil || o.dir == "" {
		return failure
	}
	if err := o.write(); err != nil {
		return err
	}
	a.note("wrote " + filepath.Join(o.dir, o.name+".json"))
	return nil
}

// write writes the files of one result.
func (o outcomeOf) write() error {
	raw, err := json.MarshalIndent(o.result, "", "  ")
	if err != nil {
		return fmt.Errorf("encode result: %w", err)
	}
	charts, err := o.charts()
	if err != nil {
		return err
	}
	if err := os.MkdirAll(o.dir, 0o755); err != nil {
		return fmt.Errorf("write result: %w", err)
	}
	files := map[string][]byte{o.name + ".json": append(raw, '\n')}
	text := o.text
	for _, suffix := range slices.Sorted(maps.Keys(charts)) {
		file := o.name + suffix + ".png"
		files[file] = charts[suffix]
		text += fmt.Sprintf("\n![%s](%s)\n", o.name+suffix, file)
	}
	files[o.name+".md"] = []byte(text)
	for file, content := range files {
		if err := os.WriteFile(filepath.Join(o.dir, file), content, 0o644); err != nil {
			return fmt.Errorf("write result: %w", err)
		}
	}
	return nil
}
