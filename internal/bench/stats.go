package bench

import (
	"math"
	"slices"
	"time"
)

// percentile returns the smallest of values that at least p percent of them do not
// exceed (nearest rank), 0 of none.
func percentile(values []float64, p float64) float64 {
	if len(values) == 0 {
		return 0
	}
	s := slices.Sorted(slices.Values(values))
	rank := int(math.Ceil(p / 100 * float64(len(s))))
	return s[min(max(rank, 1), len(s))-1]
}

// median returns the middle of values, or the mean of the two in the middle.
func median(values []float64) float64 {
	if len(values) == 0 {
		return 0
	}
	s := slices.Sorted(slices.Values(values))
	mid := len(s) / 2
	if len(s)%2 == 1 {
		return s[mid]
	}
	return (s[mid-1] + s[mid]) / 2
}

// medianIndex returns the index of the value that stands in the middle.
func medianIndex(values []float64) int {
	order := make([]int, len(values))
	for i := range order {
		order[i] = i
	}
	slices.SortStableFunc(order, func(a, b int) int {
		switch {
		case values[a] < values[b]:
			return -1
		case values[a] > values[b]:
			return 1
		}
		return 0
	})
	return order[(len(order)-1)/2]
}

// medianOf returns the median of what value gives for each item, or nil if it gives
// nothing for one.
func medianOf[T any](items []T, value func(T) *float64) *float64 {
	var all []float64
	for _, it := range items {
		v := value(it)
		if v == nil {
			return nil
		}
		all = append(all, *v)
	}
	if len(all) == 0 {
		return nil
	}
	m := round(median(all), digitsFor(all))
	return &m
}

// digitsFor keeps small figures, such as seconds of processor time, readable.
func digitsFor(values []float64) int {
	if slices.Max(values) < 10 {
		return 4
	}
	return 2
}

func round(v float64, digits int) float64 {
	f := math.Pow10(digits)
	return math.Round(v*f) / f
}

// millis is d in milliseconds, to 10 microseconds.
func millis(d time.Duration) float64 { return round(float64(d)/float64(time.Millisecond), 2) }

func ptr(v float64) *float64 { return &v }
