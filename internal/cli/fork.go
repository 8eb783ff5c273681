package cli

import (
	"context"
	"fmt"
	"time"

	"github.com/spf13/cobra"

	"forkd.dev/forkd/internal/errdefs"
	forkd "forkd.dev/forkd/sdk/go"
)

// forkFlags are the flags of fork.
type forkFlags struct {
	tag    string
	n      int
	name   string
	labels []string
	env    []string
	memory mib
	part   bool
	engine string
	cold   bool
	shape  shape
	key    string
	wait   time.Duration
	cpu    float64
	pids   int

	each        string
	secrets     []string
	reseed      string
	withSecrets bool
}

func (a *app) forkCommand() *cobra.Command {
	var f forkFlags
	cmd := &cobra.Command{
		Use:     "fork SNAPSHOT|SANDBOX",
		Aliases: []string{"spawn"},
		Short:   "Make sandboxes of a snapshot, or of a running sandbox",
		Example: "  forkd fork py-base -n 10\n  forkd fork --tag py-base --name worker --env KEY=value\n" +
			"  forkd fork worker --each hints.jsonl      # a line each: {\"env\":{\"HINT\":\"x\"},\"labels\":{...},\"files\":{\"/work/hint\":\"text\"}}",
		Args: cobra.MaximumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			ref, err := oneRef(args, "tag", f.tag)
			if err != nil {
				return err
			}
			if f.each != "" && !cmd.Flags().Changed("count") {
				f.n = 0 // as many as there are lines
			}
			return a.fork(cmd.Context(), ref, f)
		},
	}
	fl := cmd.Flags()
	fl.StringVarP(&f.tag, "tag", "t", "", "the snapshot, instead of the argument")
	fl.IntVarP(&f.n, "count", "n", 1, "number of sandboxes, 1 to 1000")
	fl.StringVar(&f.name, "name", "", "name of the sandbox (only with -n 1)")
	fl.StringArrayVarP(&f.labels, "label", "l", nil, "label KEY=VALUE (repeatable)")
	fl.StringArrayVarP(&f.env, "env", "e", nil, "environment KEY=VALUE, or KEY to pass on (repeatable)")
	fl.Var(&f.memory, "memory-limit", "limit of host memory of each sandbox")
	fl.Float64Var(&f.cpu, "cpu-limit", 0, "limit of host processors of each sandbox, e.g. 1.5")
	fl.IntVar(&f.pids, "pids-limit", 0, "limit of host processes and threads of each sandbox")
	fl.DurationVar(&f.wait, "wait", 0, "wait for room instead of failing at once, e.g. 30s")
	fl.BoolVar(&f.part, "partial", false, "keep the sandboxes that came up if others fail")
	fl.StringVar(&f.engine, "engine", "", "refuse a snapshot of another engine")
	fl.BoolVar(&f.cold, "cold", false, "boot from the snapshot's disk; its memory, which may be stale, is not used")
	fl.StringVar(&f.key, "idempotency-key", "", "a repeat with the same key makes nothing new")
	fl.StringVar(&f.each, "each", "", "file (- for standard input) with a JSON object for each sandbox, one a line: env, labels, files, files_base64")
	fl.StringArrayVar(&f.secrets, "secret", nil, "environment that is never written or listed: KEY takes its value from the environment, KEY=@FILE from a file (repeatable)")
	fl.StringVar(&f.reseed, "reseed", "", "all: every generator is new; system: those of user space go on; seed=N: they come from N and the index (default all)")
	fl.BoolVar(&f.withSecrets, "with-secrets", false, "copy a memory that holds secrets")
	f.shape.register(cmd, "; must be the snapshot's")
	fl.Bool("per-child-netns", false, "ignored: every sandbox is isolated")
	fl.Var(&f.memory, "memory-limit-mib", "alias of --memory-limit")
	_ = fl.MarkHidden("per-child-netns") // these exist
	_ = fl.MarkHidden("memory-limit-mib")
	return cmd
}

// request turns the flags into the API's body.
func (f forkFlags) request(ref string, getenv func(string) string) (forkd.ForkRequest, error) {
	labels, err := assignments("label", f.labels, nil)
	if err != nil {
		return forkd.ForkRequest{}, err
	}
	env, err := assignments("env", f.env, getenv)
	if err != nil {
		return forkd.ForkRequest{}, err
	}
	req := forkd.ForkRequest{
		SnapshotTag: ref, N: forkd.Int(f.n), Name: f.name, Labels: labels, Env: env, Partial: f.part, Engine: f.engine, Cold: f.cold,
		Reseed: f.reseed, WithSecrets: f.withSecrets,
		CPUs: f.shape.cpus, MemoryMiB: int(f.shape.memory), DiskMiB: int(f.shape.disk),
	}
	if f.memory > 0 {
		req.MemoryLimitMiB = forkd.Int(int(f.memory))
	}
	if f.cpu != 0 {
		req.CPULimit = &f.cpu
	}
	if f.pids != 0 {
		req.PIDsLimit = &f.pids
	}
	if f.wait != 0 {
		req.Wait = f.wait.String()
	}
	return req, nil
}

func (a *app) fork(ctx context.Context, ref string, f forkFlags) error {
	req, err := f.request(ref, a.env.Getenv)
	if err != nil {
		return err
	}
	if err := a.forkInputs(f, &req); err != nil {
		return err
	}
	c, err := a.client()
	if err != nil {
		return err
	}
	res, err := a.forkAll(ctx, c, req, f.key)
	if err != nil {
		return err
	}
	if f.cold {
		a.coldWarnings(res)
	}
	if err := a.list(forkListing(res)); err != nil {
		return err
	}
	return a.forkFailures(res)
}

// coldWarnings says what sandboxes that were booted from a disk have not, once for all.
func (a *app) coldWarnings(res forkd.ForkResult) {
	for _, sb := range res.Sandboxes {
		if sb.Receipt == nil {
			continue
		}
		for _, text := range sb.Receipt.NotCovered {
			a.note(oneLine(text))
		}
		return
	}
}

// forkAll forks with progress.
func (a *app) forkAll(ctx context.Context, c *forkd.Client, req forkd.ForkRequest, key string) (forkd.ForkResult, error) {
	p := a.progress()
	defer p.done()
	what, settled := fmt.Sprintf("forking %d from %s", *req.N, req.SnapshotTag), 0
	count := func() {
		settled++
		p.step(what, float64(settled)/float64(*req.N))
	}
	p.step(what, 0)
	return c.Fork(ctx, req, &forkd.ForkWatch{
		Ready:    func(int, forkd.Sandbox) { count() },
		Failed:   func(int, error) { count() },
		Progress: p.step,
		Key:      key,
	})
}

func forkListing(res forkd.ForkResult) listing {
	l := listing{header: []string{"ID", "NAME", "SNAPSHOT", "STATE", "READY IN"}}
	all := []any{}
	for _, sb := range res.Sandboxes {
		all = append(all, sb)
		l.ids = append(l.ids, sb.ID)
		l.rows = append(l.rows, []string{sb.ID, sb.Name, sb.SnapshotTag, sb.State, millis(sb.Timing.TotalMS)})
	}
	for _, f := range res.Failures {
		all = append(all, f)
	}
	l.json = all
	return l
}

// forkFailures tells which children of a partial fork failed.
func (a *app) forkFailures(res forkd.ForkResult) error {
	const shown = 10
	for i, f := range res.Failures {
		if i == shown {
			fmt.Fprintf(a.env.Stderr, "forkd: and %d more\n", len(res.Failures)-shown)
			break
		}
		fmt.Fprintf(a.env.Stderr, "forkd: sandbox %d: %s\n", f.Index, oneLine(f.Error.Error))
	}
	switch {
	case len(res.Failures) == 0:
		return nil
	case len(res.Sandboxes) == 0:
		first := res.Failures[0]
		return errdefs.WithHint(errdefs.New(errdefs.FromCode(first.Code), "none of %d sandboxes came up", len(res.Failures)), "%s", first.Hint)
	}
	return exitWith(exitPartial)
}
