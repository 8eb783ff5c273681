package cli

import (
	"context"
	"fmt"
	"runtime"
	"time"

	"github.com/spf13/cobra"

	"forkd.dev/forkd/internal/errdefs"
)

// versionTime bounds the look for a daemon's version.
const versionTime = 2 * time.Second

// absent says that this build of the command line lacks a part.
func absent(command string) error {
	return errdefs.New(errdefs.ErrUnsupported, "%s is not part of this build", command)
}

func (a *app) doctorCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "doctor",
		Short: "Check this host and say what to do about what is missing",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if a.env.Doctor == nil {
				return absent("doctor")
			}
			report, err := a.env.Doctor(cmd.Context(), a.config.Text("engine"))
			if err != nil {
				return err
			}
			if a.json {
				err = a.printJSON(report)
			} else {
				err = report.WriteText(a.env.Stdout)
			}
			if err == nil && report.Failed() {
				return exitWith(exitFailed)
			}
			return err
		},
	}
	engineFlag(cmd)
	return cmd
}

func (a *app) cleanupCommand() *cobra.Command {
	var o CleanupOptions
	cmd := &cobra.Command{
		Use:   "cleanup",
		Short: "List what earlier runs left behind; with -y, remove it",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if a.env.Cleanup == nil {
				return absent("cleanup")
			}
			if o.DataDir == "" {
				o.DataDir = a.config.Text("data_dir")
			}
			found, err := a.env.Cleanup(cmd.Context(), o)
			if err != nil {
				return err
			}
			if a.json {
				if found == nil {
					found = []string{}
				}
				return a.printJSON(map[string]any{"found": found, "removed": o.Apply})
			}
			for _, line := range found {
				fmt.Fprintln(a.env.Stdout, oneLine(line))
			}
			if len(found) > 0 && !o.Apply && !a.quiet {
				a.note("nothing was removed; repeat with -y to remove it")
			}
			return nil
		},
	}
	cmd.Flags().BoolVarP(&o.Apply, "yes", "y", false, "remove it")
	cmd.Flags().StringVar(&o.DataDir, "data-dir", "", "data directory of the daemon")
	return cmd
}

func (a *app) versionCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "version",
		Short: "Show the version of this program and of the daemon",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			ctx, cancel := context.WithTimeout(cmd.Context(), versionTime)
			defer cancel()
			daemon := "none"
			// A daemon that cannot be asked is no failure of this command.
			if c, err := a.client(); err == nil {
				if v, err := c.Version(ctx); err == nil {
					daemon = v.Version
				}
			}
			if a.json {
				return a.printJSON(map[string]string{"version": a.env.Version, "daemon": daemon, "go": runtime.Version(), "platform": runtime.GOOS + "/" + runtime.GOARCH})
			}
			_, err := fmt.Fprintf(a.env.Stdout, "forkd %s (%s, %s/%s)\ndaemon %s\n", a.env.Version, runtime.Version(), runtime.GOOS, runtime.GOARCH, daemon)
			return err
		},
	}
}
