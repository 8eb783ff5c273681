package bench

import (
	"errors"
	"testing"

	"forkd.dev/forkd/internal/errdefs"
)

func TestPercentileIsTheNearestRank(t *testing.T) {
	hundred := make([]float64, 100)
	for i := range hundred {
		hundred[i] = float64(100 - i) // order does not matter
	}
	for _, c := range []struct {
		values []float64
		p      float64
		want   float64
	}{
		{hundred, 50, 50}, {hundred, 90, 90}, {hundred, 99, 99}, {hundred, 100, 100}, {hundred, 0, 1},
		{[]float64{7}, 50, 7}, {[]float64{7}, 99, 7}, {nil, 50, 0},
		{[]float64{1, 2, 3, 4}, 50, 2}, {[]float64{1, 2, 3, 4}, 99, 4}, {[]float64{1, 2, 3, 4}, 51, 3},
	} {
		if got := percentile(c.values, c.p); got != c.want {
			t.Errorf("percentile(%v, %v) = %v, want %v", c.values, c.p, got, c.want)
		}
	}
}

func TestMedian(t *testing.T) {
	for _, c := range []struct {
		values []float64
		want   float64
		index  int
	}{
		{[]float64{5}, 5, 0}, {[]float64{9, 1, 5}, 5, 2}, {[]float64{4, 1, 3, 2}, 2.5, 3}, {[]float64{2, 2}, 2, 0},
	} {
		if got := median(c.values); got != c.want {
			t.Errorf("median(%v) = %v, want %v", c.values, got, c.want)
		}
		if got := medianIndex(c.values); got != c.index {
			t.Errorf("medianIndex(%v) = %v, want %v", c.values, got, c.index)
		}
	}
	if median(nil) != 0 {
		t.Error("median of nothing")
	}
}

// TestMissingFiguresAreNull: one run without a figure leaves no figure, instead of
// one that looks better than it is.
func TestMissingFiguresAreNull(t *testing.T) {
	of := func(v *float64) *float64 { return v }
	if got := medianOf([]*float64{ptr(1), nil, ptr(3)}, of); got != nil {
		t.Errorf("got %v", *got)
	}
	if got := medianOf([]*float64{ptr(0.1234567), ptr(0.1234567)}, of); got == nil || *got != 0.1235 {
		t.Errorf("got %v", got)
	}
	if got := medianOf([]*float64{ptr(1234.5678)}, of); got == nil || *got != 1234.57 {
		t.Errorf("got %v", got)
	}
}

func TestOptionsAreChecked(t *testing.T) {
	good := ForkOptions{Snapshot: "x", Counts: []int{1, 1000}, Runs: 1, Pool: PoolNone, Baselines: []string{BaselineRunc}}
	if err := good.Validate(); err != nil {
		t.Fatal(err)
	}
	for name, change := range map[string]func(*ForkOptions){
		"no counts": func(o *ForkOptions) { o.Counts = nil },
		"zero":      func(o *ForkOptions) { o.Counts = []int{1, 0} },
		"too many":  func(o *ForkOptions) { o.Counts = []int{1001} },
		"no runs":   func(o *ForkOptions) { o.Runs = 0 },
		"memory":    func(o *ForkOptions) { o.MemoryMiB = -1 },
		"pool":      func(o *ForkOptions) { o.Pool = "hot" },
		"baseline":  func(o *ForkOptions) { o.Baselines = []string{"docker"} },
	} {
		o := good
		change(&o)
		if err := o.Validate(); !errors.Is(err, errdefs.ErrInvalid) {
			t.Errorf("%s: %v", name, err)
		}
	}
	for _, o := range []RolloutOptions{{Count: 0, Concurrency: 1}, {Count: 1, Concurrency: 0}, {Count: 1, Concurrency: 10000}} {
		if err := o.Validate(); !errors.Is(err, errdefs.ErrInvalid) {
			t.Errorf("%+v: %v", o, err)
		}
	}
}
