package cli

import (
	"fmt"

	"github.com/spf13/cobra"

	"forkd.dev/forkd/internal/doctor"
	"forkd.dev/forkd/internal/engine/selection"
	"forkd.dev/forkd/internal/errdefs"
)

func (a *app) engineCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "engine",
		Short: "Show what can run sandboxes here, and install what is missing",
		Args:  cobra.NoArgs,
		RunE:  func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	cmd.AddCommand(a.engineListCommand(), a.engineInstallCommand())
	return cmd
}

func (a *app) engineListCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "ls",
		Short: "List the engines: which work here, how they isolate, and what to do about those that do not",
		Long: "Look at every engine of this version on this host. An engine that works is started for that, in a directory of its\n" +
			"own; no daemon is asked. The star marks the one that a daemon started here would run.",
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if a.env.Engines == nil {
				return absent("engine ls")
			}
			p := a.progress()
			p.step("looking at the engines", -1)
			list, err := a.env.Engines(cmd.Context(), a.config.Text("engine"))
			p.done()
			if err != nil {
				return err
			}
			if err := a.list(engineListing(list)); err != nil {
				return err
			}
			if !a.json && !a.quiet {
				a.note("auto = " + orNone(list.Engine.Auto) + ": " + list.Engine.Reason)
			}
			return nil
		},
	}
	engineFlag(cmd)
	return cmd
}

// engineListing shows engines; ids are of those that work.
func engineListing(list doctor.EngineList) listing {
	used := list.Engine.Setting
	if used == "" {
		used = list.Engine.Auto
	}
	out := listing{json: list, header: []string{"ENGINE", "WORKS", "VERSION", "ACCELERATOR", "ISOLATION", "MEMORY OF FORKS", "WHY NOT, AND WHAT TO DO"}}
	for _, e := range list.Engines {
		name := e.Name
		if name == used {
			name += " *"
		}
		row := []string{name, "no", e.Version, e.Accelerator, string(e.Isolation), "", e.Reason}
		switch {
		case e.Available:
			out.ids = append(out.ids, e.Name)
			row[1], row[5], row[6] = "yes", "full copy", ""
			if e.SharesMemory {
				row[5] = "shared"
			}
		case e.Remedy != "":
			row[6] += " -> " + e.Remedy
		}
		out.rows = append(out.rows, row)
	}
	return out
}

func orNone(s string) string {
	if s == "" {
		return "none"
	}
	return s
}

func (a *app) engineInstallCommand() *cobra.Command {
	var o InstallOptions
	cmd := &cobra.Command{
		Use:   "install gvisor",
		Short: "Install the program behind an engine into the data directory",
		Long: "Get runsc, the program behind the gvisor engine, into DATA/libexec: from Debian's bookworm-backports, with the package's\n" +
			"signature checked and nothing of the host changed, or with --newest built from the newest source of the Go module\n" +
			"proxy, which needs a Go toolchain and some minutes. What was there is replaced at once, when the new one has\n" +
			"answered; until then and after Ctrl-C it stays. Sandboxes that run keep the program they were started with.",
		Example:   "  forkd engine install gvisor\n  forkd engine install gvisor --newest",
		Args:      cobra.ExactArgs(1),
		ValidArgs: []string{selection.GVisor},
		RunE: func(cmd *cobra.Command, args []string) error {
			if a.env.InstallEngine == nil {
				return absent("engine install")
			}
			switch o.Engine = args[0]; o.Engine {
			case selection.GVisor:
			case selection.QEMU:
				return errdefs.WithHint(errdefs.New(errdefs.ErrUnsupported, "engine qemu is a package of the system"),
					"install it with: apt-get install --no-install-recommends qemu-system-x86")
			default:
				return errdefs.WithHint(errdefs.New(errdefs.ErrInvalid, "there is nothing to install for engine %.40q", o.Engine), "gvisor is there to install")
			}
			p := a.progress()
			o.Progress = p.step
			got, err := a.env.InstallEngine(cmd.Context(), o)
			p.done()
			if err != nil {
				return err
			}
			if a.json {
				return a.printJSON(got)
			}
			_, err = fmt.Fprintf(a.env.Stdout, "%s\n", oneLine(got.Path))
			a.note(fmt.Sprintf("installed %s %s from %s; a daemon that runs takes it at its next start", got.Engine, got.Version, got.Source))
			return err
		},
	}
	cmd.Flags().BoolVar(&o.Newest, "newest", false, "build the newest version from its source")
	return cmd
}
