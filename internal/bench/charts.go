package bench

import (
	"fmt"
	"strconv"

	"forkd.dev/forkd/internal/bench/chart"
)

// ForkCharts draws reports of one call: the sweep, or for one number of forks the
// totals and the answers one by one. Keys are suffixes of file names.
func ForkCharts(reports []ForkReport) (map[string][]byte, error) {
	if len(reports) > 1 {
		png, err := sweepChart(reports)
		return map[string][]byte{"": png}, err
	}
	out := map[string][]byte{}
	for _, r := range reports {
		var err error
		if out["-total"], err = totalChart(r); err != nil {
			return nil, err
		}
		if out["-answers"], err = answerChart(r); err != nil {
			return nil, err
		}
	}
	return out, nil
}

// where is the line below a title.
func where(m Machine, engine string) string {
	return fmt.Sprintf("%s, %s, %s, engine %s", m.CPU, count(m.Cores, "core"), m.OS, engine)
}

func totalChart(r ForkReport) ([]byte, error) {
	labels, values := []string{count(r.N, "fork")}, []float64{r.TotalMS}
	add := func(label string, ms *float64) {
		if ms != nil {
			labels, values = append(labels, label), append(values, *ms)
		}
	}
	add(fmt.Sprintf("%d plain processes", r.N), r.Baselines.Process.TotalMS)
	add(fmt.Sprintf("%d runc containers", r.N), r.Baselines.Runc.TotalMS)
	add("1 cold boot", r.Baselines.ColdBoot.MS)
	return chart.Bars(chart.Text{
		Title:    fmt.Sprintf("Until all have answered (pool: %s)", r.Pool),
		Subtitle: where(r.Machine, r.Engine), Y: "ms",
	}, labels, values)
}

func answerChart(r ForkReport) ([]byte, error) {
	labels := make([]string, len(r.children))
	for i := range labels {
		labels[i] = strconv.Itoa(i + 1)
	}
	return chart.Lines(chart.Text{
		Title:    fmt.Sprintf("%s, one answer after the other (pool: %s)", count(r.N, "fork"), r.Pool),
		Subtitle: where(r.Machine, r.Engine), X: "answers", Y: "ms since the request",
	}, labels, []chart.Series{{Name: "forks", Values: r.children}})
}

func sweepChart(reports []ForkReport) ([]byte, error) {
	first := reports[0]
	var labels []string
	forks := chart.Series{Name: "forks"}
	process := chart.Series{Name: "plain processes"}
	runc := chart.Series{Name: "runc containers"}
	for _, r := range reports {
		labels = append(labels, strconv.Itoa(r.N))
		forks.Values = append(forks.Values, r.TotalMS)
		if ms := r.Baselines.Process.TotalMS; ms != nil {
			process.Values = append(process.Values, *ms)
		}
		if ms := r.Baselines.Runc.TotalMS; ms != nil {
			runc.Values = append(runc.Values, *ms)
		}
	}
	series := []chart.Series{forks}
	for _, s := range []chart.Series{process, runc} {
		if len(s.Values) == len(labels) {
			series = append(series, s)
		}
	}
	return chart.Lines(chart.Text{
		Title:    fmt.Sprintf("Until all have answered (pool: %s)", first.Pool),
		Subtitle: where(first.Machine, first.Engine), X: "number at once", Y: "ms",
	}, labels, series)
}

// RolloutCharts draws the daemon's memory over the rollouts.
func RolloutCharts(r *RolloutReport) (map[string][]byte, error) {
	if len(r.RSS) < 2 {
		return nil, nil
	}
	var labels []string
	rss := chart.Series{Name: "daemon"}
	for _, s := range r.RSS {
		labels = append(labels, strconv.Itoa(s.Rollouts))
		rss.Values = append(rss.Values, round(float64(s.KiB)/1024, 1))
	}
	png, err := chart.Lines(chart.Text{
		Title: "Memory of the daemon over rollouts", Subtitle: where(r.Machine, r.Engine), X: "rollouts", Y: "MiB resident",
	}, labels, []chart.Series{rss})
	return map[string][]byte{"-memory": png}, err
}
