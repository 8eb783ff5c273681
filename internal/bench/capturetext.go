package bench

import (
	"fmt"
	"io"
	"strconv"
	"strings"

	"forkd.dev/forkd/internal/bench/chart"
)

// head starts the text of a report of captures.
func (a About) head(title string) string {
	return fmt.Sprintf("# %s of `%s` (%s)\n\n%d MiB of memory each, isolation %s.\n\n", title, a.Snapshot, a.Engine, a.MemoryMiB, a.Isolation)
}

// foot ends it.
func (a About) foot(how ...string) string {
	text := "\n## How\n\n- command: `" + a.Command + "`\n"
	for _, line := range how {
		text += "- " + line + "\n"
	}
	return text + machineText(a.Machine)
}

// stallHow says what a stall is.
const stallHow = "stall: a program in the guest counts in a page of its memory without a break; this host looks at the page every 0.5 ms. " +
	"The longest time without change from the request until the snapshot is ready, minus the longest in an equal time without capture"

// WriteBranchMarkdown writes a report of branches for people.
func WriteBranchMarkdown(w io.Writer, r *BranchReport) error {
	var b strings.Builder
	b.WriteString(r.head("Branches of a running sandbox"))
	b.WriteString("| mode | freeze | dirty MiB | copied MiB | pause ms | stall ms | stall max ms | call ms | ready ms | layer MiB | children | child answers in ms | source stood still for children, ms | last call / second |\n")
	b.WriteString("|--|--|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|\n")
	for _, row := range r.Rows {
		freeze := "no"
		if row.Freeze {
			freeze = "yes"
		}
		fmt.Fprintf(&b, "| %s | %s | %d | %.1f | %.1f | %s | %s | %.0f | %.0f | %.1f | %d | %s | %s | %s |\n", row.Mode, freeze, row.DirtyMiB, row.CopiedMiB, row.PauseMS,
			optional(row.StallMS, "%.1f"), optional(row.StallMaxMS, "%.1f"), row.CallMS, row.ReadyMS, mebibytes(row.LayerBytes), row.Children,
			optional(row.ChildAnswerMS, "%.0f"), optional(row.ChildrenStallMS, "%.1f"), optional(row.LastToSecond, "%.2f"))
	}
	if len(r.Rows) > 0 {
		fmt.Fprintf(&b, "\nMedians over %d branches of one sandbox, one after the other; each row has a sandbox of its own.\n", len(r.Rows[0].Runs))
	}
	stall := stallHow
	if r.StallSkipped != "" {
		stall = "stall: not measured: " + r.StallSkipped
	}
	b.WriteString(r.foot(stall,
		"call: the request of the branch, in mode live with `wait=false`; ready: until the snapshot is written and was loaded once",
		"children: forked from the branch when it is ready; each is asked `"+FirstCall+"`; the source counts on meanwhile, which takes a processor, and stands still for want of one"))
	_, err := io.WriteString(w, b.String())
	return err
}

func mebibytes(n int64) float64 { return float64(n) / (1 << 20) }

// WriteRollbackMarkdown writes a report of rollbacks for people.
func WriteRollbackMarkdown(w io.Writer, r *RollbackReport) error {
	var b strings.Builder
	b.WriteString(r.head("Rollbacks of a sandbox"))
	b.WriteString("| dirty pages | rollbacks | p50 ms | max ms | of this the call, p50 ms | state right |\n|--:|--:|--:|--:|--:|--:|\n")
	for _, row := range r.Rollbacks {
		fmt.Fprintf(&b, "| %d | %d | %.0f | %.0f | %.0f | %d/%d |\n", row.DirtyPages, row.Count, row.P50MS, row.MaxMS, row.CallP50MS, row.Right, row.Count)
	}
	if c := r.Checkpoints; c.Count > 0 {
		fmt.Fprintf(&b, "\n%s, one after the other, %d MiB written before each: call p50 %.0f ms, pause p50 %.1f ms, ready after %.0f ms.\n",
			count(c.Count, "checkpoint"), c.DirtyMiB, c.CallP50MS, c.PauseMS, c.ReadyMS)
	}
	b.WriteString("\n")
	for _, name := range []string{countProcesses, countDescriptors, countMemfds, countCgroups, countDirectories} {
		before, ok := r.Leaks.Before[name]
		if !ok || before < 0 {
			fmt.Fprintf(&b, "- %s: cannot be seen from here\n", name)
			continue
		}
		fmt.Fprintf(&b, "- %s before and after: %d, %d\n", name, before, r.Leaks.After[name])
	}
	b.WriteString(r.foot("a rollback: from the request to the first answer of the warm runner, `"+FirstCall+"`",
		"between two: random bytes in that many pages, a file written anew, one more file, one more process, a random number drawn",
		"state right: hash of the memory, all files, all processes, the next number of a seeded generator are as at the checkpoint, and the kernel's random number is new"))
	_, err := io.WriteString(w, b.String())
	return err
}

// WriteChainMarkdown writes a report of chains for people.
func WriteChainMarkdown(w io.Writer, r *ChainReport) error {
	var b strings.Builder
	b.WriteString(r.head("Forks of a chain of layers, and of the same state flat, on top"))
	b.WriteString("| ancestors | fork p50 ms | layers MiB | residency ms | first fork ms | forks |\n|--:|--:|--:|--:|--:|--:|\n")
	for _, row := range r.Rows {
		fmt.Fprintf(&b, "| %d | %.0f | %.1f | %.0f | %.0f | %d |\n", row.Depth, row.ForkP50MS, mebibytes(row.LayerBytes), row.ResidentMS, row.FirstMS, row.Forks)
	}
	fmt.Fprintf(&b, "\n%s of %d MiB. Chain / flat: %s.\n", count(r.Layers, "layer"), r.LayerMiB, optional(r.Ratio, "%.3f"))
	b.WriteString(r.foot("each layer: a fork of the one below writes other pages and is branched; flat: `snapshot compact` of the uppermost",
		"fork: from the request to the first answer, in turn, without prepared machines; residency: what the first fork of each took longer than the p50 of the others; 0 where the daemon has put the memory together when it proved the snapshot"))
	_, err := io.WriteString(w, b.String())
	return err
}

// WriteSearchMarkdown writes a report of searches for people.
func WriteSearchMarkdown(w io.Writer, r *SearchReport) error {
	var b strings.Builder
	b.WriteString(r.head("A toy tree search on machines"))
	b.WriteString("| back to a node by | nodes | seconds | nodes/s | right |\n|--|--:|--:|--:|--|\n")
	for _, row := range r.Rows {
		right := "yes"
		if !row.Correct {
			right = row.Skipped
		}
		fmt.Fprintf(&b, "| %s | %d | %s | %s | %s |\n", strings.ReplaceAll(row.By, "_", " "), row.Nodes, optional(row.TotalS, "%.2f"), optional(row.NodesPerS, "%.2f"), right)
	}
	fmt.Fprintf(&b, "\n%s at each node, depth %d; a node counts once its move has answered, checked against its path.\n", count(r.Branching, "move"), r.Depth)
	b.WriteString(r.foot("rollback: one machine, a checkpoint at each inner node", "fork: a machine for each node, a branch of each inner node",
		"cold start: a boot of the same machine for each of a few nodes, without making its moves again"))
	_, err := io.WriteString(w, b.String())
	return err
}

// BranchCharts draws stalls over what is dirty.
func BranchCharts(r *BranchReport) (map[string][]byte, error) {
	var labels []string
	var values []float64
	for _, row := range r.Rows {
		if row.StallMS == nil {
			return nil, nil
		}
		label := fmt.Sprintf("%d MiB", row.DirtyMiB)
		if row.Freeze {
			label += " frozen"
		}
		if row.Children > 1 {
			label += fmt.Sprintf(", x%d", row.Children)
		}
		labels = append(labels, label) // short, or it is left out
		values = append(values, *row.StallMS)
	}
	if len(values) == 0 {
		return nil, nil
	}
	png, err := chart.Bars(chart.Text{Title: "How long a branch stops its source (xN: with N children)", Subtitle: where(r.Machine, r.Engine), Y: "ms"}, labels, values)
	return map[string][]byte{"-stall": png}, err
}

// RollbackCharts draws rollbacks one after the other.
func RollbackCharts(r *RollbackReport) (map[string][]byte, error) {
	out := map[string][]byte{}
	for _, row := range r.Rollbacks {
		var labels []string
		for i := range row.times {
			labels = append(labels, strconv.Itoa(i+1))
		}
		if len(labels) < 2 {
			continue
		}
		png, err := chart.Lines(chart.Text{
			Title:    fmt.Sprintf("Rollback to the first answer, %d pages dirty", row.DirtyPages),
			Subtitle: where(r.Machine, r.Engine), X: "rollbacks", Y: "ms",
		}, labels, []chart.Series{{Name: "rollbacks", Values: row.times}})
		if err != nil {
			return nil, err
		}
		out[fmt.Sprintf("-%dpages", row.DirtyPages)] = png
	}
	return out, nil
}

// ChainCharts draws forks of the chain next to those of the flat state.
func ChainCharts(r *ChainReport) (map[string][]byte, error) {
	var labels []string
	var values []float64
	for _, row := range r.Rows {
		labels, values = append(labels, count(row.Depth, "ancestor")), append(values, row.ForkP50MS)
	}
	png, err := chart.Bars(chart.Text{Title: "Fork to the first answer, p50", Subtitle: where(r.Machine, r.Engine), Y: "ms"}, labels, values)
	return map[string][]byte{"-forks": png}, err
}

// SearchCharts draws nodes per second.
func SearchCharts(r *SearchReport) (map[string][]byte, error) {
	var labels []string
	var values []float64
	for _, row := range r.Rows {
		if row.NodesPerS != nil {
			labels, values = append(labels, strings.ReplaceAll(row.By, "_", " ")), append(values, *row.NodesPerS)
		}
	}
	if len(values) == 0 {
		return nil, nil
	}
	png, err := chart.Bars(chart.Text{Title: "Tree search on machines", Subtitle: where(r.Machine, r.Engine), Y: "nodes per second"}, labels, values)
	return map[string][]byte{"-nodes": png}, err
}
