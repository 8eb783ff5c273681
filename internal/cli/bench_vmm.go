package cli

import (
	"github.com/spf13/cobra"

	"forkd.dev/forkd/internal/bench/vmmbench"
	"forkd.dev/forkd/internal/programs"
)

func (a *app) benchVMMCommand() *cobra.Command {
	o := vmmbench.Options{}
	var out string
	cmd := &cobra.Command{
		Use:   "vmm",
		Short: "Measure the monitor of the kvm engine alone, next to a C program that makes the same calls",
		Long: "Fork, roll back and capture a guest of a few kilobytes in forkd-vmm processes, without daemon and agent, in turn with\n" +
			"a C program that does the same by the bare ioctls in one process. Needs /dev/kvm, also one that emulates kernel code, and\n" +
			"gcc. As root each process has its own uid and an empty root, as for sandboxes. Measure on a quiet machine.",
		Example: "  forkd bench vmm --runs 7 --out bench/results\n  forkd bench vmm --json",
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			var err error
			if o.Program, err = programs.Monitor(); err != nil {
				return err
			}
			p := a.progress()
			defer p.done()
			o.Progress = func(step string) { p.step(step, 0) }
			return writeBench(a, captureBench[vmmbench.Report]{
				text: vmmbench.WriteMarkdown, charts: vmmbench.Charts, out: out,
				name: func(*vmmbench.Report) string { return "vmm" },
			}, func() (*vmmbench.Report, error) {
				r, err := vmmbench.Run(cmd.Context(), o)
				p.done()
				return r, err
			})
		},
	}
	fl := cmd.Flags()
	fl.IntVar(&o.Runs, "runs", 3, "runs of each, of which medians are reported (at least 7 for figures to publish)")
	fl.BoolVar(&o.Large, "large", false, "also 1,000 forks at once")
	outFlag(cmd, &out)
	return cmd
}
