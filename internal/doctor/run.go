package doctor

import "context"

// Input is what a report is made of.
type Input struct {
	Facts   Facts
	Engines []Engine
	// Setting is the engine that is set for the daemon; "" or auto: none.
	Setting string
	// DataDir is where images and snapshots are kept.
	DataDir string
	// Sizing is what one more sandbox takes.
	Sizing Sizing
	// Daemon returns the version of the daemon that answers. ErrUnavailable: none
	// runs. Nil skips the check.
	Daemon func(ctx context.Context) (version string, err error)
	// Leftovers lists what earlier runs left behind, in words. Nil skips the check.
	Leftovers func(ctx context.Context) ([]string, error)
}

// Sizing is what the capacity estimate counts with; zero values mean the defaults.
type Sizing struct {
	PSSMiB       int // of one idle fork of py-base; default 26
	Tasks        int // processes and threads of one sandbox; default 6
	Files        int // descriptors the daemon holds for one sandbox; default 8
	MaxSandboxes int // the daemon's own limit; 0 means none
	BudgetPct    int // of the host's memory for sandboxes; default 80
}

func (s Sizing) withDefaults() Sizing {
	def := func(v *int, d int) {
		if *v <= 0 {
			*v = d
		}
	}
	def(&s.PSSMiB, 26)
	def(&s.Tasks, 6)
	def(&s.Files, 8)
	def(&s.BudgetPct, 80)
	return s
}

// Run judges the input. It blocks only in the two functions it was given.
func Run(ctx context.Context, in Input) Report {
	in.Sizing = in.Sizing.withDefaults()
	auto := auto(in.Facts, in.Engines, in.Setting)
	r := Report{Engine: auto, Checks: []Check{
		platform(in.Facts),
		architecture(in.Facts),
		virtualization(in.Facts),
		kvm(in.Facts),
		engineCheck(in, auto),
		isolation(in, auto),
		kernel(in.Facts),
		cgroups(in.Facts),
		user(in.Facts),
		images(in.Facts),
		capacity(in),
		disk(in),
		sharedMemory(in.Facts),
	}}
	r.Checks = append(r.Checks, engineChecks(in)...)
	r.Checks = append(r.Checks, tools(in.Facts)...)
	r.Checks = append(r.Checks, daemon(ctx, in), leftovers(ctx, in))
	return r
}
