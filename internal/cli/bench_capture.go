package cli

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"slices"

	"github.com/spf13/cobra"

	"forkd.dev/forkd/internal/bench"
	"forkd.dev/forkd/internal/errdefs"
)

// captureBench is one kind of measurement: how to make a report, and what to do
// with it.
type captureBench[R any] struct {
	measure func(context.Context, bench.Config) (*R, error)
	text    func(io.Writer, *R) error
	charts  func(*R) (map[string][]byte, error)
	name    func(*R) string // of the files
	out     string
}

// runCaptureBench measures and writes down what it gave.
func runCaptureBench[R any](cmd *cobra.Command, a *app, b captureBench[R]) error {
	cfg, done, err := a.measuring(cmd.Context(), commandLine(cmd))
	if err != nil {
		return err
	}
	return writeBench(a, b, func() (*R, error) {
		report, err := b.measure(cmd.Context(), cfg)
		done()
		return report, err
	})
}

// writeBench measures and writes down what it gave.
func writeBench[R any](a *app, b captureBench[R], measure func() (*R, error)) error {
	report, err := measure()
	if report == nil {
		return err
	}
	var text bytes.Buffer
	if err := b.text(&text, report); err != nil {
		return err
	}
	draw := func() (map[string][]byte, error) { return b.charts(report) }
	return a.benchDone(outcomeOf{report, text.String(), b.out, b.name(report), draw}, err)
}

// outFlag is where every measurement writes.
func outFlag(cmd *cobra.Command, out *string) {
	cmd.Flags().StringVar(out, "out", "", "directory for JSON, Markdown and charts, e.g. bench/results")
}

// fullDirtyMiB is the row that only --full adds, and fullMemoryMiB what it needs.
const (
	fullDirtyMiB  = 500
	fullMemoryMiB = 1536
)

func (a *app) benchBranchCommand() *cobra.Command {
	o := bench.BranchOptions{}
	var memory mib
	var out, freeze string
	var full bool
	cmd := &cobra.Command{
		Use:   "branch",
		Short: "Measure branches: how long the source stands still, as this host sees it",
		Long: "Branch a running sandbox again and again, with more or less memory written before. A program in the guest counts without\n" +
			"a break, and this host looks at its counter in the machine's memory, which needs root on the daemon's host; stalls are\n" +
			"null without. Each branch is forked, and each child asked. Measure on a quiet machine.",
		Example: "  forkd bench branch --out bench/results\n  forkd bench branch --dirty 10 --freeze false --runs 3 --json",
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			switch freeze {
			case "both":
				o.Freeze = []bool{true, false}
			case "true", "false":
				o.Freeze = []bool{freeze == "true"}
			default:
				return errdefs.New(errdefs.ErrInvalid, "--freeze %.40q: true, false and both are there", freeze)
			}
			o.MemoryMiB = int(memory)
			if full && !slices.Contains(o.DirtyMiB, fullDirtyMiB) {
				o.DirtyMiB = append(o.DirtyMiB, fullDirtyMiB)
			}
			if full && o.MemoryMiB == 0 {
				o.MemoryMiB = fullMemoryMiB
			}
			if err := o.Validate(); err != nil {
				return err
			}
			return runCaptureBench(cmd, a, captureBench[bench.BranchReport]{
				measure: func(ctx context.Context, cfg bench.Config) (*bench.BranchReport, error) {
					return bench.Branch(ctx, cfg, o)
				},
				text: bench.WriteBranchMarkdown, charts: bench.BranchCharts, out: out,
				name: func(r *bench.BranchReport) string {
					return fmt.Sprintf("branch-%s-%s-%dMiB", r.Engine, o.Mode, r.MemoryMiB)
				},
			})
		},
	}
	fl := cmd.Flags()
	fl.StringVarP(&o.Snapshot, "tag", "t", builtin, "the snapshot to fork; it needs Python and numpy")
	fl.StringVar(&o.Mode, "mode", "live", "live, diff or full")
	fl.IntVar(&o.Runs, "runs", 10, "branches in a row for each line of the result")
	fl.IntSliceVar(&o.DirtyMiB, "dirty", []int{1, 10, 100}, "MiB written before each branch")
	fl.IntSliceVar(&o.Children, "children", []int{1, 10}, "forks of each branch; those after the first are measured with at most 10 MiB dirty")
	fl.StringVar(&freeze, "freeze", "both", "freeze user processes around the capture: true, false or both")
	fl.Var(&memory, "memory", "memory of the machines; a snapshot of that size is made for the measurement")
	fl.BoolVar(&full, "full", false, "also with 500 MiB dirty, in machines of 1536 MiB unless --memory says otherwise")
	outFlag(cmd, &out)
	return cmd
}

func (a *app) benchRollbackCommand() *cobra.Command {
	var o bench.RollbackOptions
	var out string
	cmd := &cobra.Command{
		Use:   "rollback",
		Short: "Measure rollbacks up to the first answer, and check the state after each",
		Long: "Change memory, files and processes of a sandbox, roll it back and ask its warm interpreter, again and again; then\n" +
			"checkpoints one after the other. Ends with exit code 4 if a state was not right, 1 if something is left behind.",
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := o.Validate(); err != nil {
				return err
			}
			return runCaptureBench(cmd, a, captureBench[bench.RollbackReport]{
				measure: func(ctx context.Context, cfg bench.Config) (*bench.RollbackReport, error) {
					return bench.Rollback(ctx, cfg, o)
				},
				text: bench.WriteRollbackMarkdown, charts: bench.RollbackCharts, out: out,
				name: func(r *bench.RollbackReport) string { return "rollback-" + r.Engine },
			})
		},
	}
	fl := cmd.Flags()
	fl.StringVarP(&o.Snapshot, "tag", "t", builtin, "the snapshot to fork; it needs Python and numpy")
	fl.IntVarP(&o.Count, "count", "n", 200, "number of rollbacks")
	fl.IntSliceVar(&o.Pages, "pages", []int{1000}, "pages written between two rollbacks")
	fl.IntVar(&o.Checkpoints, "checkpoints", 10, "checkpoints to measure, 0 for none")
	fl.IntVar(&o.DirtyMiB, "dirty", 10, "MiB written before each of them")
	outFlag(cmd, &out)
	return cmd
}

func (a *app) benchChainCommand() *cobra.Command {
	var o bench.ChainOptions
	var out string
	cmd := &cobra.Command{
		Use:   "chain",
		Short: "Measure forks of a chain of layers next to the same state in one",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := o.Validate(); err != nil {
				return err
			}
			return runCaptureBench(cmd, a, captureBench[bench.ChainReport]{
				measure: func(ctx context.Context, cfg bench.Config) (*bench.ChainReport, error) {
					return bench.Chain(ctx, cfg, o)
				},
				text: bench.WriteChainMarkdown, charts: bench.ChainCharts, out: out,
				name: func(r *bench.ChainReport) string { return fmt.Sprintf("chain-%s-%d", r.Engine, o.Depth) },
			})
		},
	}
	fl := cmd.Flags()
	fl.StringVarP(&o.Snapshot, "tag", "t", builtin, "the snapshot at the bottom; it needs Python and numpy")
	fl.IntVar(&o.Depth, "depth", 10, "number of layers")
	fl.IntVar(&o.LayerMiB, "layer", 20, "MiB written for each layer")
	fl.IntVarP(&o.Count, "count", "n", 20, "forks of each")
	outFlag(cmd, &out)
	return cmd
}

func (a *app) benchSearchCommand() *cobra.Command {
	var o bench.SearchOptions
	var out string
	cmd := &cobra.Command{
		Use:   "search",
		Short: "Measure a toy tree search by rollback, by fork and by cold start",
		Long:  "Search a small tree whose nodes are states of a machine, and count nodes in a second.\nEnds with exit code 4 if a node was not in the state of its path.",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := o.Validate(); err != nil {
				return err
			}
			return runCaptureBench(cmd, a, captureBench[bench.SearchReport]{
				measure: func(ctx context.Context, cfg bench.Config) (*bench.SearchReport, error) {
					return bench.Search(ctx, cfg, o)
				},
				text: bench.WriteSearchMarkdown, charts: bench.SearchCharts, out: out,
				name: func(r *bench.SearchReport) string { return "search-" + r.Engine },
			})
		},
	}
	fl := cmd.Flags()
	fl.StringVarP(&o.Snapshot, "tag", "t", builtin, "the snapshot to fork; it needs Python and numpy")
	fl.IntVar(&o.Branching, "branching", 3, "moves at each node")
	fl.IntVar(&o.Depth, "depth", 2, "depth of the tree")
	fl.IntVar(&o.ColdNodes, "cold", 1, "nodes to start cold, 0 for none")
	outFlag(cmd, &out)
	return cmd
}
