package cli

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sync/errgroup"

	"forkd.dev/forkd/internal/errdefs"
	forkd "forkd.dev/forkd/sdk/go"
)

// demoReport is the result of demo, as --json prints it.
type demoReport struct {
	N         int         `json:"n"`
	Snapshot  string      `json:"snapshot"`
	Engine    string      `json:"engine"`
	Isolation string      `json:"isolation"`
	Steps     []demoStep  `json:"steps"`
	Forks     []demoFork  `json:"forks"`
	Unique    []demoProof `json:"unique"`
	Story     *demoStory  `json:"story"`
}

// demoStep is how long one step took for all forks.
type demoStep struct {
	Name   string  `json:"name"`
	MS     float64 `json:"ms"`
	Detail string  `json:"detail"`
}

// demoFork is one fork.
type demoFork struct {
	ID         string            `json:"id"`
	ReadyMS    float64           `json:"ready_ms"`
	EvalMS     float64           `json:"eval_ms"`
	Answer     string            `json:"answer"` // to the first eval
	PSSKiB     int64             `json:"pss_kib"`
	PrivateKiB int64             `json:"private_kib"`
	Values     map[string]string `json:"values"`
}

func (a *app) demoCommand() *cobra.Command {
	var n int
	var tag string
	cmd := &cobra.Command{
		Use:   "demo",
		Short: "Fork, evaluate in each fork, branch, roll back, show times and memory, clean up",
		Long:  "Fork N sandboxes, run code in the warm interpreter of each, show how long it took, what a fork costs\nin memory and that no two forks share what must be unique. Then branch a running program into children\nwith different hints, roll one of them back and draw the tree. Everything is removed in the end.\nIf no daemon runs, a private one is started for this time.",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if n < 1 || n > 1000 {
				return errdefs.New(errdefs.ErrInvalid, "-n is %d, want 1 to 1000", n)
			}
			return a.demo(cmd.Context(), tag, n)
		},
	}
	cmd.Flags().IntVarP(&n, "count", "n", 10, "number of forks")
	cmd.Flags().StringVarP(&tag, "tag", "t", builtin, "the snapshot to fork")
	engineFlag(cmd)
	return cmd
}

func (a *app) demo(ctx context.Context, tag string, n int) error {
	c, err := a.clientOrPrivate(ctx)
	if err != nil {
		return err
	}
	report := demoReport{N: n, Snapshot: tag}
	if err := a.demoSteps(ctx, c, &report); err != nil {
		return err
	}
	if a.json {
		err = a.printJSON(report)
	} else {
		err = a.printDemo(report)
	}
	if err != nil {
		return err
	}
	for _, p := range report.Unique {
		if !p.OK {
			return errdefs.New(errdefs.ErrInternal, "%s: only %d different values in %d forks", p.Name, p.Different, n)
		}
	}
	return nil
}

// demoSteps does the work and removes what it made, however it ends.
func (a *app) demoSteps(ctx context.Context, c *forkd.Client, r *demoReport) (err error) {
	if err := a.demoReady(ctx, c, r); err != nil {
		return err
	}
	start := time.Now()
	made, err := a.forkAll(ctx, c, forkd.ForkRequest{SnapshotTag: r.Snapshot, N: forkd.Int(r.N)}, "")
	if err != nil {
		return err
	}
	all := ids(made.Sandboxes)
	defer func() {
		start := time.Now()
		err = a.after(removeAll(ctx, c, all), err)
		r.step("kill", start, fmt.Sprintf("%d sandboxes", len(all)))
	}()
	for _, sb := range made.Sandboxes {
		r.Engine, r.Isolation = sb.Engine, sb.Isolation
		r.Forks = append(r.Forks, demoFork{ID: sb.ID, ReadyMS: sb.Timing.TotalMS})
	}
	if len(r.Forks) != r.N {
		return errdefs.New(errdefs.ErrInternal, "the daemon answered with %d sandboxes instead of %d", len(r.Forks), r.N)
	}
	r.step("fork", start, "each ready in "+spread(r.Forks, func(f demoFork) float64 { return f.ReadyMS }))
	if err := a.demoEval(ctx, c, r); err != nil {
		return err
	}
	if err := a.demoMemory(ctx, c, r); err != nil {
		return err
	}
	if err := a.demoProof(ctx, c, r); err != nil {
		return err
	}
	r.Unique = prove(r.Forks)
	return a.demoBranch(ctx, c, r, &all)
}

// demoReady forks one first if the snapshot must still be made, so that the times
// of the forks are those of forks.
func (a *app) demoReady(ctx context.Context, c *forkd.Client, r *demoReport) error {
	if _, err := c.Snapshot(ctx, r.Snapshot); !errors.Is(err, forkd.ErrNotFound) {
		return err
	}
	start := time.Now()
	made, err := a.forkAll(ctx, c, forkd.ForkRequest{SnapshotTag: r.Snapshot, N: forkd.Int(1)}, "")
	if err != nil {
		return err
	}
	r.step("prepare", start, "image, boot, warm-up and capture of "+r.Snapshot)
	return removeAll(ctx, c, ids(made.Sandboxes))
}

func (r *demoReport) step(name string, start time.Time, detail string) {
	r.Steps = append(r.Steps, demoStep{Name: name, MS: float64(time.Since(start).Microseconds()) / 1000, Detail: detail})
}

func (a *app) demoEval(ctx context.Context, c *forkd.Client, r *demoReport) error {
	p := a.progress()
	defer p.done()
	p.step(fmt.Sprintf("evaluating in %d sandboxes", r.N), -1)
	start := time.Now()
	err := eachFork(ctx, r.Forks, func(ctx context.Context, f *demoFork) error {
		begun := time.Now()
		res, err := c.Eval(ctx, f.ID, forkd.EvalRequest{Code: firstCode(r.Snapshot)})
		if err != nil {
			return err
		}
		f.EvalMS = float64(time.Since(begun).Microseconds()) / 1000
		if res.Error != nil || res.Result == nil {
			return errdefs.New(errdefs.ErrGuest, "the first eval failed: %+v", res)
		}
		f.Answer = *res.Result
		return nil
	})
	if err != nil {
		return err
	}
	r.step("eval", start, fmt.Sprintf("each answers %s in %s", r.Forks[0].Answer, spread(r.Forks, func(f demoFork) float64 { return f.EvalMS })))
	return nil
}

// firstCode is what each fork is asked first.
func firstCode(snapshot string) string {
	if snapshot == builtin {
		return "import numpy; numpy.__version__"
	}
	return "import sys; sys.version.split()[0]"
}

// demoProof asks each fork for what must differ between them. It is more code than
// a first answer needs, so it comes after times and memory were taken.
func (a *app) demoProof(ctx context.Context, c *forkd.Client, r *demoReport) error {
	p := a.progress()
	defer p.done()
	p.step(fmt.Sprintf("comparing %d sandboxes", r.N), -1)
	start := time.Now()
	err := eachFork(ctx, r.Forks, func(ctx context.Context, f *demoFork) error {
		res, err := c.Eval(ctx, f.ID, forkd.EvalRequest{Code: proofCode})
		if err != nil {
			return err
		}
		f.Values, err = proofValues(res)
		return err
	})
	if err != nil {
		return err
	}
	r.step("proof", start, "random numbers and names of all forks, compared below")
	return nil
}

func (a *app) demoMemory(ctx context.Context, c *forkd.Client, r *demoReport) error {
	start := time.Now()
	err := eachFork(ctx, r.Forks, func(ctx context.Context, f *demoFork) error {
		sb, err := c.Sandbox(ctx, f.ID)
		if err != nil || sb.Usage == nil {
			return err
		}
		f.PSSKiB, f.PrivateKiB = sb.Usage.PSSKiB, sb.Usage.PrivateKiB
		return nil
	})
	if err != nil {
		return err
	}
	pss := median(r.Forks, func(f demoFork) float64 { return float64(f.PSSKiB) })
	private := median(r.Forks, func(f demoFork) float64 { return float64(f.PrivateKiB) })
	r.step("memory", start, fmt.Sprintf("per fork: PSS %s, private %s (median)", size(int64(pss)<<10), size(int64(private)<<10)))
	return nil
}

// eachFork does work for each fork, a few at a time; the first error ends it.
func eachFork(ctx context.Context, forks []demoFork, work func(context.Context, *demoFork) error) error {
	g, ctx := errgroup.WithContext(ctx)
	// More at once would only wait for each other, and their times would say so.
	g.SetLimit(2 * runtime.NumCPU())
	for i := range forks {
		g.Go(func() error {
			if err := work(ctx, &forks[i]); err != nil {
				return fmt.Errorf("sandbox %s: %w", forks[i].ID, err)
			}
			return nil
		})
	}
	return g.Wait()
}

func sorted(forks []demoFork, value func(demoFork) float64) []float64 {
	out := make([]float64, 0, len(forks))
	for _, f := range forks {
		out = append(out, value(f))
	}
	slices.Sort(out)
	return out
}

func median(forks []demoFork, value func(demoFork) float64) float64 {
	s := sorted(forks, value)
	return s[len(s)/2]
}

// spread says the median and the largest of times in milliseconds.
func spread(forks []demoFork, ms func(demoFork) float64) string {
	s := sorted(forks, ms)
	return fmt.Sprintf("%s (median), %s (slowest)", millis(s[len(s)/2]), millis(s[len(s)-1]))
}
