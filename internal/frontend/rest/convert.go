package rest

import (
	"cmp"
	"strings"
	"time"
	"unicode/utf8"

	api "forkd.dev/forkd/api/rest"
	"forkd.dev/forkd/internal/agentwire"
	"forkd.dev/forkd/internal/engine"
	"forkd.dev/forkd/internal/sandbox"
)

// convert maps a list; the result is never nil, so JSON has [] and not null.
func convert[D, W any](list []D, one func(D) W) []W {
	out := make([]W, 0, len(list))
	for _, d := range list {
		out = append(out, one(d))
	}
	return out
}

func ms(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 }

func positive(n int) *int {
	if n <= 0 {
		return nil
	}
	return &n
}

func orEmpty(m map[string]string) map[string]string {
	if m == nil {
		return map[string]string{}
	}
	return m
}

func orNone(list []string) []string {
	if list == nil {
		return []string{}
	}
	return list
}

func sandboxOf(sb sandbox.Sandbox) api.Sandbox {
	out := api.Sandbox{
		ID: sb.ID, SnapshotTag: cmp.Or(sb.SnapshotTag, sb.SnapshotID), CreatedAtUnix: sb.CreatedAt.Unix(),
		PID: positive(sb.PID), MemoryLimitMiB: positive(sb.MemoryLimitMiB),
		HasBranched: sb.BranchCount > 0, BranchCount: sb.BranchCount,
		Name: sb.Name, State: string(sb.State), Reason: sb.Reason, SnapshotID: sb.SnapshotID,
		Engine: sb.Engine, Isolation: string(sb.Isolation),
		CPUs: sb.Shape.CPUs, MemoryMiB: sb.Shape.MemoryMiB, DiskMiB: sb.Shape.DiskMiB,
		CPULimit: cpuLimit(sb.CPULimitPercent), PIDsLimit: positive(sb.PIDsLimit),
		Labels: orEmpty(sb.Labels), HoldsSecrets: sb.HoldsSecrets, Auto: autoOf(sb.Auto), Receipt: receiptOf(sb.Receipt),
		Timing: api.Timing{
			Pool: string(sb.Timing.Pool), StartMS: ms(sb.Timing.Start), HelloMS: ms(sb.Timing.Hello),
			IdentityMS: ms(sb.Timing.Identity), TotalMS: ms(sb.Timing.Total),
		},
	}
	if !sb.EndedAt.IsZero() {
		ended := sb.EndedAt.Unix()
		out.EndedAtUnix = &ended
	}
	return out
}

func receiptOf(r *agentwire.Receipt) *api.Receipt {
	if r == nil {
		return nil
	}
	return &api.Receipt{
		Steps: convert(r.Steps, func(s agentwire.ReceiptStep) api.ReceiptStep {
			return api.ReceiptStep{Name: s.Name, Status: s.Status, Detail: s.Detail}
		}),
		Generation: r.Generation, ClockOffsetMS: ms(r.ClockOffset), DurationMS: ms(r.Duration), NotCovered: orNone(r.NotCovered),
	}
}

func usageOf(u engine.Usage) *api.Usage {
	out := &api.Usage{
		PSSKiB: u.PSSKiB, PrivateKiB: u.PrivateKiB, RSSKiB: u.RSSKiB, CPUMS: ms(u.CPU),
		DiskBytes: u.DiskBytes, GuestPagesKiB: u.GuestPagesKiB, SharedKiB: max(u.RSSKiB-u.PrivateKiB, 0),
	}
	if !u.LastActivity.IsZero() {
		out.LastActivityUnixMS = u.LastActivity.UnixMilli()
	}
	return out
}

func forkLine(it sandbox.ForkItem) api.ForkLine {
	line := api.ForkLine{Index: &it.Index}
	if it.Err != nil {
		b := body(it.Err)
		line.Error, line.Code, line.Hint = b.Error, b.Code, b.Hint
		return line
	}
	sb := sandboxOf(it.Sandbox)
	line.Sandbox = &sb
	return line
}

// text splits guest output into text that JSON can hold and, only if that is not
// the same, the exact bytes.
func text(raw []byte) (string, []byte) {
	if utf8.Valid(raw) {
		return string(raw), nil
	}
	return strings.ToValidUTF8(string(raw), "\uFFFD"), raw
}

func execResultOf(r agentwire.ExecResult) api.ExecResult {
	out := api.ExecResult{
		ExitCode: r.ExitCode, Signal: r.Signal, TimedOut: r.TimedOut, OOMKilled: r.OOMKilled,
		Truncated:  r.StdoutTruncated || r.StderrTruncated,
		DurationMS: ms(r.Duration), CPUMS: ms(r.CPU), MaxRSSKiB: r.MaxRSSKiB,
	}
	out.Stdout, out.StdoutBase64 = text(r.Stdout)
	out.Stderr, out.StderrBase64 = text(r.Stderr)
	return out
}

func evalResultOf(r agentwire.EvalResult) api.EvalResult {
	out := api.EvalResult{
		Traceback: strings.ToValidUTF8(r.Traceback, "\uFFFD"), TimedOut: r.TimedOut, RunnerRestarted: r.RunnerRestarted,
		Truncated: r.StdoutTruncated || r.StderrTruncated || r.ResultTruncated, DurationMS: ms(r.Duration),
	}
	if r.Error != "" {
		message := strings.ToValidUTF8(r.Error, "\uFFFD")
		out.Error, out.ExitCode = &message, 1
	} else if r.HasResult {
		result := strings.ToValidUTF8(r.Result, "\uFFFD")
		out.Result = &result
	}
	out.Stdout, out.StdoutBase64 = text(r.Stdout)
	out.Stderr, out.StderrBase64 = text(r.Stderr)
	return out
}

func pongOf(p agentwire.Pong) api.Pong {
	out := api.Pong{
		Pong: true, NumpyVersion: cmp.Or(p.NumpyVersion, "not-installed"), PID: p.PID, AgentLang: "python",
		WarmupReady: p.WarmupReady, AgentVersion: p.AgentVersion, ProtocolVersion: p.ProtocolVersion,
		WallClockUnixMS: p.WallClock.UnixMilli(), UptimeMS: ms(p.Uptime), Runners: orNone(p.Runners),
		PythonVersion: p.PythonVersion, Generation: p.Generation,
	}
	if len(p.Runners) > 0 {
		out.AgentLang = p.Runners[0]
	}
	return out
}
