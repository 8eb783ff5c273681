package vmmbench

import (
	"context"
	"fmt"
	"io"
	"math"

	"forkd.dev/forkd/internal/bench/chart"
	"forkd.dev/forkd/internal/errdefs"
)

// Options say what Run measures.
type Options struct {
	Program []byte // forkd-vmm
	Runs    int    // medians are of so many
	Large   bool   // also 1,000 forks at once
	// Progress, if set, is told what comes next.
	Progress func(step string)
}

// Report is the result. The names in JSON stay.
type Report struct {
	Floor           Forks      `json:"floor"`
	Pooled          Forks      `json:"pooled"`
	Unpooled        Forks      `json:"unpooled"`
	Rollback        []Rollback `json:"rollback"`
	Branch          []Branch   `json:"branch"`
	DestroyMS       float64    `json:"destroy_ms"` // of 100
	PSSKiB          float64    `json:"pss_kib"`
	PrivateDirtyKiB float64    `json:"private_dirty_kib"`
}

// Forks are medians of several runs.
type Forks struct {
	Fork100MS  float64  `json:"fork100_ms"`
	Fork1000MS *float64 `json:"fork1000_ms"` // null: not measured
	ForkP50MS  float64  `json:"fork_p50_ms"`
}

// Rollback is a rollback of so many written pages.
type Rollback struct {
	Pages int     `json:"pages"`
	MS    float64 `json:"ms"`
}

// Branch is a capture of a running guest with so many pages of its own.
type Branch struct {
	Pages   int     `json:"pages"`
	PauseMS float64 `json:"pause_ms"`
	TotalMS float64 `json:"total_ms"`
}

// hotPages is how many of its pages a guest rewrites while it is captured.
const hotPages = 2000

// Run measures all. It needs /dev/kvm and a C compiler.
func Run(ctx context.Context, o Options) (*Report, error) {
	if o.Runs < 1 {
		return nil, errdefs.New(errdefs.ErrInvalid, "cannot measure %d runs", o.Runs)
	}
	if o.Progress == nil {
		o.Progress = func(string) {}
	}
	h, err := openHost(o.Program)
	if err != nil {
		return nil, err
	}
	defer h.close()
	r := &Report{}
	if err := h.forks(ctx, o, r); err != nil {
		return nil, err
	}
	for _, n := range []int{100, 10_000, 50_000} {
		o.Progress(fmt.Sprintf("rolling back %d pages", n))
		ms, err := h.rollback(ctx, n, o.Runs)
		if err != nil {
			return nil, err
		}
		r.Rollback = append(r.Rollback, Rollback{n, round(median(ms))})
	}
	for _, n := range []int{700, 50_000} {
		o.Progress(fmt.Sprintf("capturing a guest with %d pages of its own", n))
		pause, total, err := h.branch(ctx, n, min(n, hotPages), o.Runs)
		if err != nil {
			return nil, err
		}
		r.Branch = append(r.Branch, Branch{n, round(median(pause)), round(median(total))})
	}
	return r, nil
}

func (h *host) forks(ctx context.Context, o Options, r *Report) error {
	const few, many = 100, 1000
	s, err := h.makeSnapshot(ctx, fmt.Sprintf("base=%d touch=64 wait=1", baseMiB))
	if err != nil {
		return err
	}
	defer s.close()
	program, err := h.buildFloor(ctx)
	if err != nil {
		return err
	}
	kinds := []struct {
		name string
		to   *Forks
		run  func(n int) (forked, error)
	}{
		{"by the floor", &r.Floor, func(n int) (forked, error) { return h.runFloor(ctx, program, s, n) }},
		{"pooled", &r.Pooled, func(n int) (forked, error) { return h.fork(ctx, s, n, true) }},
		{"unpooled", &r.Unpooled, func(n int) (forked, error) { return h.fork(ctx, s, n, false) }},
	}
	all := make([][]forked, len(kinds))
	for range o.Runs { // in turn, so that a busy moment hits all
		for i, k := range kinds {
			o.Progress(fmt.Sprintf("making %d forks %s", few, k.name))
			f, err := k.run(few)
			if err != nil {
				return err
			}
			all[i] = append(all[i], f)
		}
	}
	for i, k := range kinds {
		k.to.Fork100MS = medianOf(all[i], func(f forked) float64 { return f.totalMS })
		k.to.ForkP50MS = medianOf(all[i], func(f forked) float64 { return f.p50MS })
	}
	r.DestroyMS = medianOf(all[1], func(f forked) float64 { return f.destroyMS })
	r.PSSKiB = medianOf(all[1], func(f forked) float64 { return f.pssKiB })
	r.PrivateDirtyKiB = medianOf(all[1], func(f forked) float64 { return f.dirtyKiB })
	if !o.Large {
		return nil
	}
	for _, k := range kinds[:2] {
		o.Progress(fmt.Sprintf("making %d forks %s", many, k.name))
		f, err := k.run(many)
		if err != nil {
			return err
		}
		total := round(f.totalMS)
		k.to.Fork1000MS = &total
	}
	return nil
}

func medianOf(all []forked, field func(forked) float64) float64 {
	v := make([]float64, len(all))
	for i, f := range all {
		v[i] = field(f)
	}
	return round(median(v))
}

func round(v float64) float64 { return math.Round(v*100) / 100 }

// WriteMarkdown writes the report as tables.
func WriteMarkdown(w io.Writer, r *Report) error {
	ratio := func(f Forks) string { return fmt.Sprintf("%.2f", f.Fork100MS/r.Floor.Fork100MS) }
	thousand := func(f Forks) string {
		if f.Fork1000MS == nil {
			return "-"
		}
		return fmt.Sprintf("%.0f", *f.Fork1000MS)
	}
	_, err := fmt.Fprintf(w, "| forks | 100 (ms) | to the floor | one, p50 (ms) | 1,000 (ms) |\n|---|---|---|---|---|\n")
	for _, row := range []struct {
		name string
		f    Forks
	}{{"C floor, one process", r.Floor}, {"pooled", r.Pooled}, {"unpooled", r.Unpooled}} {
		if err == nil {
			_, err = fmt.Fprintf(w, "| %s | %.1f | %s | %.2f | %s |\n", row.name, row.f.Fork100MS, ratio(row.f), row.f.ForkP50MS, thousand(row.f))
		}
	}
	if err == nil {
		_, err = fmt.Fprintf(w, "\nEnd of 100: %.0f ms. Memory of one process: PSS %.0f KiB, private and dirty %.0f KiB.\n\n| rollback of pages | ms |\n|---|---|\n",
			r.DestroyMS, r.PSSKiB, r.PrivateDirtyKiB)
	}
	for _, b := range r.Rollback {
		if err == nil {
			_, err = fmt.Fprintf(w, "| %d | %.2f |\n", b.Pages, b.MS)
		}
	}
	if err == nil {
		_, err = fmt.Fprintf(w, "\n| branch with own pages | pause (ms) | total (ms) |\n|---|---|---|\n")
	}
	for _, b := range r.Branch {
		if err == nil {
			_, err = fmt.Fprintf(w, "| %d | %.2f | %.2f |\n", b.Pages, b.PauseMS, b.TotalMS)
		}
	}
	return err
}

// Charts draws the forks. Keys are suffixes of file names.
func Charts(r *Report) (map[string][]byte, error) {
	png, err := chart.Bars(chart.Text{
		Title: "100 forks of one guest, until all have answered", Subtitle: "512 MiB, 64 MiB written, 2 at a time; without daemon and agent", Y: "ms",
	}, []string{"C, bare ioctls, one process", "forkd-vmm, pooled", "forkd-vmm, from the start of the process"},
		[]float64{r.Floor.Fork100MS, r.Pooled.Fork100MS, r.Unpooled.Fork100MS})
	return map[string][]byte{"": png}, err
}
