package chart_test

import (
	"bytes"
	"image/png"
	"testing"

	"forkd.dev/forkd/internal/bench/chart"
)

// pixels decodes a chart and counts its colours: an empty one has few.
func pixels(t *testing.T, raw []byte) int {
	t.Helper()
	img, err := png.Decode(bytes.NewReader(raw))
	if err != nil {
		t.Fatal(err)
	}
	seen := map[[3]uint32]bool{}
	for y := img.Bounds().Min.Y; y < img.Bounds().Max.Y; y++ {
		for x := img.Bounds().Min.X; x < img.Bounds().Max.X; x++ {
			r, g, b, _ := img.At(x, y).RGBA()
			seen[[3]uint32{r, g, b}] = true
		}
	}
	return len(seen)
}

func TestChartsAreDrawn(t *testing.T) {
	text := chart.Text{Title: "Until all have answered", Subtitle: "a machine", X: "number", Y: "ms"}
	lines, err := chart.Lines(text, []string{"1", "10", "50"}, []chart.Series{{Name: "forks", Values: []float64{50, 300, 1200}}, {Name: "runc", Values: []float64{90, 700, 4000}}})
	if err != nil {
		t.Fatal(err)
	}
	bars, err := chart.Bars(text, []string{"forks", "runc"}, []float64{0.5, 4000})
	if err != nil {
		t.Fatal(err)
	}
	for _, raw := range [][]byte{lines, bars} {
		if n := pixels(t, raw); n < 20 {
			t.Errorf("only %d colours", n)
		}
	}
}

// TestChartsOfNothing: few or no values draw, or fail, but never panic.
func TestChartsOfNothing(t *testing.T) {
	if _, err := chart.Lines(chart.Text{}, []string{"1"}, []chart.Series{{Values: []float64{0}}}); err != nil {
		t.Errorf("one value: %v", err)
	}
	if _, err := chart.Lines(chart.Text{}, []string{"1"}, []chart.Series{{Values: nil}}); err == nil {
		t.Error("a value is missing and nobody says so")
	}
	if _, err := chart.Bars(chart.Text{}, nil, nil); err == nil {
		t.Error("bars of nothing")
	}
}
