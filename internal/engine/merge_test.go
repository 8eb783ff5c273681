package engine

import "testing"

func TestMergeFrom(t *testing.T) {
	for _, c := range []struct {
		name  string
		sizes []int64
		least int
		want  int
	}{
		{"nothing", nil, 2, 0},
		{"fewer than the least", []int64{5, 5}, 4, 0},
		{"a large one stays below", []int64{100, 1, 1, 1}, 3, 1},
		{"one of their size goes with them", []int64{100, 6, 1, 1, 1}, 3, 1},
		{"the least go whatever their size", []int64{1, 1000, 1}, 2, 0},
		{"zero sizes", []int64{0, 0, 0}, 1, 0},
	} {
		if got := MergeFrom(c.sizes, c.least); got != c.want {
			t.Errorf("%s: merge from %d, want %d", c.name, got, c.want)
		}
	}
}

// TestMergeFromBounds: a stack that grows for long and is merged whenever it has 24
// layers stays short, and each byte is copied a few times only.
func TestMergeFromBounds(t *testing.T) {
	const n, most = 5000, 24
	var stack []int64
	copied, longest := int64(0), 0
	for range n {
		stack = append(stack, 1)
		if len(stack) < most {
			continue
		}
		from := MergeFrom(stack, most/2)
		sum := int64(0)
		for _, s := range stack[from:] {
			sum += s
		}
		copied += sum
		stack = append(stack[:from:from], sum)
		longest = max(longest, len(stack))
	}
	if longest > most/2+1 || copied > 12*n {
		t.Errorf("after a merge up to %d layers are left, %d bytes were copied for %d written", longest, copied, n)
	}
}
