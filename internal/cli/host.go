package cli

import (
	"context"
	"fmt"
	"log/slog"
	"runtime"
	"strconv"
	"strings"
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
	return &cobra.Command{
		Use:   "doctor",
		Short: "Check this host and say what to do about what is missing",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if a.env.Doctor == nil {
				return absent("doctor")
			}
			report, err := a.env.Doctor(cmd.Context())
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
}

func (a *app) serveCommand() *cobra.Command {
	o := ServeOptions{DataDir: a.env.Getenv("FORKD_DATA_DIR"), TokenFile: a.env.Getenv("FORKD_TOKEN_FILE")}
	var level string
	cmd := &cobra.Command{
		Use:   "serve",
		Short: "Run the daemon",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if a.env.Serve == nil {
				return absent("serve")
			}
			if err := a.serveEnv(cmd, &o); err != nil {
				return err
			}
			if err := o.LogLevel.UnmarshalText([]byte(level)); err != nil {
				return errdefs.New(errdefs.ErrInvalid, "--log-level %.40q is not debug, info, warn or error", level)
			}
			return a.env.Serve(cmd.Context(), o)
		},
	}
	f := cmd.Flags()
	f.StringArrayVar(&o.Bind, "bind", nil, "TCP address to listen on (repeatable; $FORKD_BIND; default 127.0.0.1:8889)")
	f.StringArrayVar(&o.Bind, "listen", nil, "alias of --bind")
	f.StringVar(&o.DataDir, "data-dir", o.DataDir, "where everything is kept ($FORKD_DATA_DIR; default /var/lib/forkd for root)")
	f.StringVar(&o.TokenFile, "token-file", o.TokenFile, "file with the bearer token ($FORKD_TOKEN_FILE)")
	f.StringSliceVar(&o.Prepare, "prepare", nil, "built-in snapshots to make ready, e.g. "+builtin)
	f.IntVar(&o.MaxSandboxes, "max-sandboxes", 0, "limit of sandboxes at once ($FORKD_MAX_SANDBOXES; 0 is by memory alone)")
	f.StringVar(&o.Engine, "engine", "auto", "what runs sandboxes: auto, qemu")
	f.StringArrayVar(&o.AllowedHosts, "allow-host", nil, "further Host name to accept on loopback without a token (repeatable)")
	f.StringVar(&level, "log-level", slog.LevelInfo.String(), "debug, info, warn or error")
	return cmd
}

// serveEnv fills what no flag set from the environment.
func (a *app) serveEnv(cmd *cobra.Command, o *ServeOptions) error {
	// The two names share one list, and each starts it anew at its first use.
	if cmd.Flags().Changed("bind") && cmd.Flags().Changed("listen") {
		return errdefs.New(errdefs.ErrInvalid, "--bind and --listen are the same: use one of them")
	}
	if text := a.env.Getenv("FORKD_BIND"); text != "" && len(o.Bind) == 0 {
		o.Bind = strings.Split(text, ",")
	}
	if text := a.env.Getenv("FORKD_MAX_SANDBOXES"); text != "" && !cmd.Flags().Changed("max-sandboxes") {
		n, err := strconv.Atoi(text)
		if err != nil {
			return errdefs.New(errdefs.ErrInvalid, "FORKD_MAX_SANDBOXES=%.40q is not a number", text)
		}
		o.MaxSandboxes = n
	}
	if o.MaxSandboxes < 0 {
		return errdefs.New(errdefs.ErrInvalid, "--max-sandboxes %d is negative", o.MaxSandboxes)
	}
	return nil
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
	cmd.Flags().StringVar(&o.DataDir, "data-dir", a.env.Getenv("FORKD_DATA_DIR"), "data directory of the daemon")
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
