// Package chart draws the charts of measurements as PNG. It knows figures and
// words only, not what was measured.
package chart

import (
	"fmt"
	"strconv"

	"github.com/go-analyze/charts"
)

// Size of a chart in pixels.
const (
	width  = 960
	height = 480
)

// Text is the words of a chart.
type Text struct {
	Title, Subtitle string
	X, Y            string // names of the axes, with their units
}

// Series is one line of a chart.
type Series struct {
	Name   string
	Values []float64 // as many as there are labels
}

// maxLabels is how many labels fit below a chart.
const maxLabels = 20

// Lines draws series over labels that stand at equal distances.
func Lines(t Text, labels []string, series []Series) ([]byte, error) {
	data := make([][]float64, len(series))
	names := make([]string, len(series))
	for i, s := range series {
		if len(s.Values) != len(labels) {
			return nil, fmt.Errorf("draw %s: %d values of %s for %d labels", t.Title, len(s.Values), s.Name, len(labels))
		}
		data[i], names[i] = s.Values, s.Name
	}
	opt := charts.NewLineChartOptionWithData(data)
	opt.Title = title(t)
	opt.Legend = charts.LegendOption{SeriesNames: names, Offset: charts.OffsetStr{Left: "right"}, Show: charts.Ptr(len(series) > 1)}
	opt.XAxis.Labels, opt.XAxis.Title = labels, t.X
	opt.XAxis.LabelCount = min(len(labels), maxLabels)
	opt.YAxis = []charts.YAxisOption{{Title: t.Y, Min: charts.Ptr(0.0)}}
	opt.ValueFormatter = number
	return render(t, func(p *charts.Painter) error { return p.LineChart(opt) })
}

// Bars draws one bar with its value for each label.
func Bars(t Text, labels []string, values []float64) ([]byte, error) {
	if len(labels) != len(values) || len(values) == 0 {
		return nil, fmt.Errorf("draw %s: %d values for %d labels", t.Title, len(values), len(labels))
	}
	opt := charts.NewBarChartOptionWithData([][]float64{values})
	opt.Title = title(t)
	opt.CategoryAxis.Labels = labels
	opt.ValueAxis = []charts.ValueAxisOption{{Title: t.Y, Min: charts.Ptr(0.0)}}
	opt.SeriesList[0].Label.Show = charts.Ptr(true)
	opt.SeriesList[0].Label.ValueFormatter = number
	opt.ValueFormatter = number
	opt.BarSize = 0.5
	return render(t, func(p *charts.Painter) error { return p.BarChart(opt) })
}

// Groups draws for each label one bar of each series, side by side.
func Groups(t Text, labels []string, series []Series) ([]byte, error) {
	data := make([][]float64, len(series))
	names := make([]string, len(series))
	for i, s := range series {
		if len(s.Values) != len(labels) {
			return nil, fmt.Errorf("draw %s: %d values of %s for %d labels", t.Title, len(s.Values), s.Name, len(labels))
		}
		data[i], names[i] = s.Values, s.Name
	}
	if len(series) == 0 || len(labels) == 0 {
		return nil, fmt.Errorf("draw %s: nothing to draw", t.Title)
	}
	opt := charts.NewBarChartOptionWithData(data)
	opt.Title = title(t)
	opt.Legend = charts.LegendOption{SeriesNames: names, Offset: charts.OffsetStr{Left: "right"}, Show: charts.Ptr(true)}
	opt.CategoryAxis.Labels = labels
	opt.ValueAxis = []charts.ValueAxisOption{{Title: t.Y, Min: charts.Ptr(0.0)}}
	for i := range opt.SeriesList {
		opt.SeriesList[i].Label.Show = charts.Ptr(true)
		opt.SeriesList[i].Label.ValueFormatter = number
	}
	opt.ValueFormatter = number
	return render(t, func(p *charts.Painter) error { return p.BarChart(opt) })
}

func title(t Text) charts.TitleOption {
	return charts.TitleOption{Text: t.Title, Subtext: t.Subtitle}
}

// number writes a value without useless digits.
func number(v float64) string {
	if v >= 10 || v == 0 {
		return strconv.FormatFloat(v, 'f', 0, 64)
	}
	return strconv.FormatFloat(v, 'g', 3, 64)
}

func render(t Text, draw func(*charts.Painter) error) ([]byte, error) {
	p := charts.NewPainter(charts.PainterOptions{OutputFormat: charts.ChartOutputPNG, Width: width, Height: height})
	if err := draw(p); err != nil {
		return nil, fmt.Errorf("draw %s: %w", t.Title, err)
	}
	png, err := p.Bytes()
	if err != nil {
		return nil, fmt.Errorf("draw %s: %w", t.Title, err)
	}
	return png, nil
}
