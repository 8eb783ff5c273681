package bench

import (
	"fmt"
	"io"
	"strings"

	"forkd.dev/forkd/internal/bench/chart"
)

// WriteGuestMarkdown writes a report of user code for people.
func WriteGuestMarkdown(w io.Writer, r *GuestReport) error {
	var b strings.Builder
	fmt.Fprintf(&b, "# Speed of user code in a fork of `%s`\n\n", r.Snapshot)
	b.WriteString(r.header("work", "native ms"))
	for _, work := range r.Work {
		fmt.Fprintf(&b, "| %s | %s |", work.What, timeOf(r.Native.MS, work.Name))
		for _, e := range r.Engines {
			cell := timeOf(e.MS, work.Name)
			if ratio, ok := e.Ratio[work.Name]; ok {
				cell = fmt.Sprintf("%.1fx (%s)", ratio, cell)
			}
			fmt.Fprintf(&b, " %s |", cell)
		}
		b.WriteString("\n")
	}
	fmt.Fprintf(&b, "\nTimes native, and milliseconds: medians over %d runs of the best of %s.\n", r.Runs, count(r.Rounds, "round"))
	fmt.Fprintf(&b, "\n## How\n\n- command: `%s`\n", r.Command)
	native := r.Native.How
	if r.Native.Skipped != "" {
		native = "not measured: " + r.Native.Skipped
	}
	fmt.Fprintf(&b, "- native: %s\n", native)
	b.WriteString("- one script, `internal/bench/guest.py`, in a new Python of the same image; each run has a fork of its own, in turn with a native run; the answers were the same everywhere\n")
	for _, e := range r.Engines {
		fmt.Fprintf(&b, "- engine %s: %s, isolation %s, %d MiB, files on %s, Python %s, numpy %s; its clock / ours: %.3f\n",
			e.Engine, orUnknown(e.Version), e.Isolation, e.MemoryMiB, e.FilesOn, e.Python, e.Numpy, e.ClockRatio)
	}
	for _, s := range r.Skipped {
		fmt.Fprintf(&b, "- engine %s: not measured: %s\n", s.Engine, s.Why)
	}
	b.WriteString(machineText(r.Machine))
	_, err := io.WriteString(w, b.String())
	return err
}

func (r *GuestReport) header(first ...string) string {
	for _, e := range r.Engines {
		first = append(first, e.Engine)
	}
	return "| " + strings.Join(first, " | ") + " |\n|--|" + strings.Repeat("--:|", len(first)-1) + "\n"
}

func timeOf(t Times, name string) string {
	ms, ok := t[name]
	switch {
	case !ok:
		return "-"
	case ms < 100:
		return fmt.Sprintf("%.1f", ms)
	}
	return fmt.Sprintf("%.0f", ms)
}

func orUnknown(s string) string {
	if s == "" {
		return "version unknown"
	}
	return s
}

// GuestCharts draws how many times longer than natively each work takes; nothing if
// there is no native figure.
func GuestCharts(r *GuestReport) (map[string][]byte, error) {
	labels := make([]string, 0, len(r.Work))
	for _, w := range r.Work {
		labels = append(labels, strings.ReplaceAll(w.Name, "_", " "))
	}
	var series []chart.Series
	names := make([]string, 0, len(r.Engines))
	for _, e := range r.Engines {
		s := chart.Series{Name: e.Engine}
		for _, w := range r.Work {
			ratio, ok := e.Ratio[w.Name]
			if !ok {
				return nil, nil
			}
			s.Values = append(s.Values, ratio)
		}
		series, names = append(series, s), append(names, e.Engine)
	}
	if len(series) == 0 {
		return nil, nil
	}
	png, err := chart.Groups(chart.Text{
		Title: "User code in a fork: how many times the native time", Subtitle: where(r.Machine, strings.Join(names, ", ")), Y: "times native",
	}, labels, series)
	return map[string][]byte{"-ratio": png}, err
}
