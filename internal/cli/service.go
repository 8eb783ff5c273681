package cli

import (
	"fmt"
	"os"
	"strings"

	"github.com/spf13/cobra"

	"forkd.dev/forkd/internal/config"
	"forkd.dev/forkd/internal/errdefs"
	"forkd.dev/forkd/internal/service"
)

func (a *app) serviceCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "service",
		Short: "Make the daemon a service of systemd",
		Args:  cobra.NoArgs,
		RunE:  func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	cmd.AddCommand(a.serviceInstallCommand(), a.serviceUninstallCommand(), a.serviceStatusCommand())
	return cmd
}

// serviceHost is the machine whose services are meant.
func (a *app) serviceHost() service.Host {
	if a.env.ServiceHost != nil {
		return *a.env.ServiceHost
	}
	return service.ThisHost()
}

func (a *app) serviceInstallCommand() *cobra.Command {
	o := service.Options{}
	noStart := false
	cmd := &cobra.Command{
		Use:   "install",
		Short: "Write the unit file, create the group, and start the daemon",
		Long: "Write /etc/systemd/system/" + service.Name + " for this program, create the group " + service.Group + ", enable the service and start it.\n" +
			"Settings belong into " + config.SystemFile + ". Sandboxes survive restarts of the service. It may be repeated, also after an upgrade.",
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if o.Binary == "" {
				self, err := os.Executable()
				if err != nil {
					return errdefs.As(errdefs.ErrInvalid, fmt.Errorf("find this program: %w", err))
				}
				o.Binary = self
			}
			o.Start = !noStart
			steps, err := a.serviceHost().Install(cmd.Context(), o)
			return a.serviceDone(steps, o.DryRun, err)
		},
	}
	f := cmd.Flags()
	f.StringVar(&o.Binary, "binary", "", "path of forkd (default: this program)")
	f.StringVar(&o.DataDir, "data-dir", "", "where everything is kept (default /var/lib/forkd)")
	f.BoolVar(&noStart, "no-start", false, "only write the unit file")
	f.BoolVar(&o.DryRun, "dry-run", false, "only show what would be done")
	return cmd
}

func (a *app) serviceUninstallCommand() *cobra.Command {
	o := service.Options{}
	cmd := &cobra.Command{
		Use:   "uninstall",
		Short: "Stop the daemon and remove the unit file; data and sandboxes stay",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			steps, err := a.serviceHost().Uninstall(cmd.Context(), o)
			return a.serviceDone(steps, o.DryRun, err)
		},
	}
	cmd.Flags().BoolVar(&o.DryRun, "dry-run", false, "only show what would be done")
	return cmd
}

// serviceDone shows the steps, also those before one that failed.
func (a *app) serviceDone(steps []service.Step, dry bool, err error) error {
	if a.json && err == nil {
		return a.printJSON(map[string]any{"steps": steps, "dry_run": dry})
	}
	for _, s := range steps {
		fmt.Fprintln(a.env.Stdout, s.Text)
		if dry && s.Content != "" {
			fmt.Fprintln(a.env.Stdout, "  "+strings.ReplaceAll(strings.TrimSpace(s.Content), "\n", "\n  "))
		}
	}
	if dry && err == nil && !a.quiet {
		a.note("nothing was changed")
	}
	return err
}

func (a *app) serviceStatusCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "status",
		Short: "Show whether the service is installed and runs",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			st, err := a.serviceHost().Status(cmd.Context())
			if err != nil {
				return err
			}
			if a.json {
				return a.printJSON(st)
			}
			installed := "no"
			if st.Installed {
				installed = "yes"
			}
			return a.table(nil, [][]string{{"installed", installed}, {"unit", st.Path}, {"active", st.Active}, {"enabled", st.Enabled}})
		},
	}
}
