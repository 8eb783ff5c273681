package bench

import (
	"fmt"
	"io"
	"strings"
)

// WriteForkMarkdown writes reports of one call for people.
func WriteForkMarkdown(w io.Writer, reports []ForkReport) error {
	if len(reports) == 0 {
		return nil
	}
	var b strings.Builder
	first := reports[0]
	fmt.Fprintf(&b, "# Forks of `%s` (%s, pool: %s)\n\n", first.Snapshot, first.Engine, first.Pool)
	b.WriteString(ForkText(first) + "\n\n")
	if len(reports) == 1 {
		b.WriteString(sentence(first) + "\n\n")
	}
	b.WriteString("| n | total ms | per fork: p50 | p90 | p99 | max | PSS MiB each | CPU s each | pool prepared in ms | processes ms | runc ms | forks answered |\n")
	b.WriteString("|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|\n")
	for _, r := range reports {
		fmt.Fprintf(&b, "| %d | %s | %.0f | %.0f | %.0f | %.0f | %.1f | %s | %.0f | %s | %s | %d/%d |\n", r.N,
			withSpread(r.TotalMS, r.Runs, func(run ForkRun) *float64 { return &run.TotalMS }), r.P50MS, r.P90MS, r.P99MS, r.MaxMS,
			r.PSSKiBPerChild/1024, optional(r.CPUSPerFork, "%.3f"), r.PoolPrepareMS,
			withSpread(value(r.Baselines.Process.TotalMS), r.Runs, func(run ForkRun) *float64 { return run.ProcessTotalMS }),
			withSpread(value(r.Baselines.Runc.TotalMS), r.Runs, func(run ForkRun) *float64 { return run.RuncTotalMS }),
			r.Answered, r.N)
	}
	b.WriteString("\nMedians over " + count(len(first.Runs), "run") + "; in brackets the least and the largest.\n")
	if len(reports) > 1 {
		b.WriteString("\n")
		for _, r := range reports {
			b.WriteString("- " + sentence(r) + "\n")
		}
	}
	b.WriteString("\n## How\n\n" + how(first))
	_, err := io.WriteString(w, b.String())
	return err
}

// ForkText says in a line what a report measured.
func ForkText(r ForkReport) string {
	return fmt.Sprintf("From the request to the first answer of each guest's warm runner, %d MiB of memory each, isolation %s.", r.MemoryMiB, r.Isolation)
}

// sentence compares the forks with the baselines.
func sentence(r ForkReport) string {
	text := fmt.Sprintf("%s answered in %s", count(r.N, "fork"), seconds(r.TotalMS))
	if r.Answered < r.N {
		return text + fmt.Sprintf(", but only %d were right: not a result.", r.Answered)
	}
	var parts []string
	add := func(ms, ratio *float64, what string) {
		if ms == nil || ratio == nil {
			return
		}
		word, times := "faster than", *ratio
		if times < 1 && times > 0 {
			word, times = "slower than", 1/times
		}
		parts = append(parts, fmt.Sprintf("%.1f times %s %s (%s)", times, word, what, seconds(*ms)))
	}
	add(r.Baselines.Process.TotalMS, r.Ratios.Process, "as many plain processes")
	add(r.Baselines.Runc.TotalMS, r.Ratios.Runc, "as many runc containers")
	if cold := r.Baselines.ColdBoot.MS; cold != nil {
		parts = append(parts, fmt.Sprintf("one cold boot takes %s", seconds(*cold)))
	}
	if len(parts) > 0 {
		text += ": " + strings.Join(parts, ", ")
	}
	if r.Pool != PoolNone {
		text += fmt.Sprintf("; preparing the pool before took %s", seconds(r.PoolPrepareMS))
	}
	return text + "."
}

// how says what was run, on what.
func how(r ForkReport) string {
	var b strings.Builder
	fmt.Fprintf(&b, "- command: `%s`\n", r.Command)
	fmt.Fprintf(&b, "- first call: `%s`\n", FirstCall)
	b.WriteString(claimedText(r.Claimed, r.N))
	for _, line := range []struct{ name, how, skipped string }{
		{"plain processes", r.Baselines.Process.How, r.Baselines.Process.Skipped},
		{"runc", r.Baselines.Runc.How, r.Baselines.Runc.Skipped},
		{"cold boot", r.Baselines.ColdBoot.How, r.Baselines.ColdBoot.Skipped},
	} {
		if line.skipped != "" {
			fmt.Fprintf(&b, "- %s: not measured: %s\n", line.name, line.skipped)
		} else {
			fmt.Fprintf(&b, "- %s: %s\n", line.name, line.how)
		}
	}
	return b.String() + machineText(r.Machine)
}

// claimedText says from which pools the children of runs of n came.
func claimedText(claimed map[string]int, n int) string {
	var parts []string
	for _, p := range []Pool{PoolWarm, PoolBlank, PoolNone} {
		if c := claimed[string(p)]; c > 0 {
			parts = append(parts, fmt.Sprintf("%d %s", c, p))
		}
	}
	if parts == nil {
		return ""
	}
	return fmt.Sprintf("- claimed from the pools (n = %d, all runs): %s\n", n, strings.Join(parts, ", "))
}

func machineText(m Machine) string {
	kvm := "no /dev/kvm"
	if m.KVM {
		kvm = "with /dev/kvm"
	}
	return fmt.Sprintf("- machine: %s, %s, %d MiB, %s, Linux %s, virtualization: %s, %s, load before: %.2f\n- versions: forkd %s, QEMU %s\n- date: %s\n",
		m.CPU, count(m.Cores, "core"), m.MemoryMiB, m.OS, m.Kernel, m.Virtualization, kvm, m.Load1, m.Forkd, m.QEMU, m.Date)
}

func withSpread(mid float64, runs []ForkRun, of func(ForkRun) *float64) string {
	if len(runs) == 0 || of(runs[0]) == nil {
		return "-"
	}
	low, high := *of(runs[0]), *of(runs[0])
	for _, r := range runs {
		if v := of(r); v != nil {
			low, high = min(low, *v), max(high, *v)
		}
	}
	if len(runs) == 1 {
		return fmt.Sprintf("%.0f", mid)
	}
	return fmt.Sprintf("%.0f (%.0f-%.0f)", mid, low, high)
}

func optional(v *float64, format string) string {
	if v == nil {
		return "-"
	}
	return fmt.Sprintf(format, *v)
}

func value(v *float64) float64 {
	if v == nil {
		return 0
	}
	return *v
}

func seconds(ms float64) string {
	if ms < 1000 {
		return fmt.Sprintf("%.0f ms", ms)
	}
	return fmt.Sprintf("%.2f s", ms/1000)
}

func count(n int, what string) string {
	if n == 1 {
		return "1 " + what
	}
	return fmt.Sprintf("%d %ss", n, what)
}

// WriteRolloutMarkdown writes a report of rollouts for people.
func WriteRolloutMarkdown(w io.Writer, r *RolloutReport) error {
	var b strings.Builder
	fmt.Fprintf(&b, "# Rollouts of `%s` (%s)\n\n", r.Snapshot, r.Engine)
	fmt.Fprintf(&b, "%s of fork, eval and kill, %d at a time: **%.1f rollouts/s**. %d MiB of memory each, isolation %s.\n\n",
		count(r.Count, "round"), r.Concurrency, r.RolloutsPerS, r.MemoryMiB, r.Isolation)
	b.WriteString("| | p50 ms | p90 ms | p99 ms | max ms |\n|--|--:|--:|--:|--:|\n")
	fmt.Fprintf(&b, "| whole round | %.0f | %.0f | %.0f | %.0f |\n", r.P50MS, r.P90MS, r.P99MS, r.MaxMS)
	fmt.Fprintf(&b, "| request to first answer | %.0f | | %.0f | |\n\n", r.AnswerP50MS, r.AnswerP99MS)
	fmt.Fprintf(&b, "- answered: %d of %d\n- CPU: %s s per rollout (daemon, machines, client)\n", r.Answered, r.Count, optional(r.CPUSPerRoll, "%.3f"))
	for _, name := range []string{countProcesses, countDescriptors, countMemfds, countCgroups, countDirectories} {
		if r.Leaks.Before[name] < 0 {
			fmt.Fprintf(&b, "- %s: cannot be seen from here\n", name)
			continue
		}
		fmt.Fprintf(&b, "- %s before and after: %d, %d\n", name, r.Leaks.Before[name], r.Leaks.After[name])
	}
	if n := len(r.RSS); n > 0 {
		fmt.Fprintf(&b, "- memory of the daemon: %.1f MiB after %d rollouts, %.1f MiB after %d", float64(r.RSS[0].KiB)/1024, r.RSS[0].Rollouts, float64(r.RSS[n-1].KiB)/1024, r.RSS[n-1].Rollouts)
		if r.RSSGrowth != nil {
			fmt.Fprintf(&b, " (%+.1f %% since rollout %d)", *r.RSSGrowth, rssWarm)
		}
		b.WriteString("\n")
	}
	fmt.Fprintf(&b, "\n## How\n\n- command: `%s`\n- first call: `%s`\n%s%s", r.Command, FirstCall, claimedText(r.Claimed, r.Count), machineText(r.Machine))
	_, err := io.WriteString(w, b.String())
	return err
}
