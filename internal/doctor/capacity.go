package doctor

import (
	"fmt"
)

// fit is how many more sandboxes a resource has room for.
type fit struct {
	what string
	n    int64
}

// fits lists what is known to bind.
func fits(in Input) []fit {
	f, s := in.Facts, in.Sizing
	var out []fit
	if f.MemoryErr == nil {
		used := f.Memory.TotalKiB - f.Memory.AvailableKiB
		budget := f.Memory.TotalKiB*int64(s.BudgetPct)/100 - used
		room := max(min(budget, f.Memory.AvailableKiB), 0)
		out = append(out, fit{"memory", room / (int64(s.PSSMiB) * 1024)})
	}
	if f.FreeTasks >= 0 {
		out = append(out, fit{"processes", f.FreeTasks / int64(s.Tasks)})
	}
	if f.FileLimit >= 0 {
		const daemonsOwn = 64
		out = append(out, fit{"descriptors", max(f.FileLimit-daemonsOwn, 0) / int64(s.Files)})
	}
	if s.MaxSandboxes > 0 {
		out = append(out, fit{"max-sandboxes", int64(s.MaxSandboxes)})
	}
	return out
}

func capacity(in Input) Check {
	const name = "memory"
	f := in.Facts
	if f.MemoryErr != nil {
		return notPass(name, Warn, f.MemoryErr.Error(), "mount /proc")
	}
	least := fits(in)[0]
	for _, x := range fits(in) {
		if x.n < least.n {
			least = x
		}
	}
	detail := fmt.Sprintf("%s of %s available; about %d more forks of py-base fit (%d MiB each), limited by %s",
		bytesText(f.Memory.AvailableKiB*1024), bytesText(f.Memory.TotalKiB*1024), least.n, in.Sizing.PSSMiB, least.what)
	remedy := map[string]string{
		"memory":        "end programs, or add memory",
		"processes":     "raise kernel.pid_max, kernel.threads-max, pids.max of the control group or ulimit -u",
		"descriptors":   "raise the limit of open files: ulimit -Hn, or LimitNOFILE= in the unit",
		"max-sandboxes": "raise --max-sandboxes",
	}[least.what]
	const few = 10
	switch {
	case least.n == 0:
		return notPass(name, Fail, detail, remedy)
	case least.n < few:
		return notPass(name, Warn, detail, remedy)
	}
	return pass(name, "%s", detail)
}

func disk(in Input) Check {
	const (
		name   = "disk"
		least  = 1 << 30 // one image, its build folder and one snapshot
		little = 5 << 30
	)
	d := in.Facts.Disk
	if in.Facts.DiskErr != nil {
		return notPass(name, Fail, in.Facts.DiskErr.Error(), "choose another --data-dir")
	}
	detail := fmt.Sprintf("%s of %s free at %s", bytesText(d.AvailableBytes), bytesText(d.TotalBytes), d.Path)
	if d.Path != in.DataDir && in.DataDir != "" {
		detail += fmt.Sprintf(" (%s does not exist yet)", in.DataDir)
	}
	const remedy = "free space, or choose another --data-dir"
	switch {
	case d.AvailableBytes < least, d.AvailableFiles == 0:
		return notPass(name, Fail, detail, remedy)
	case d.AvailableBytes < little:
		return notPass(name, Warn, detail, remedy)
	}
	return pass(name, "%s", detail)
}

func bytesText(n int64) string {
	const gib = 1 << 30
	if n >= gib {
		return fmt.Sprintf("%.1f GiB", float64(n)/gib)
	}
	return fmt.Sprintf("%d MiB", n>>20)
}
