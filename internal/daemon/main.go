package daemon

import (
	"context"
	"fmt"
	"os"

	"forkd.dev/forkd/internal/cli"
	"forkd.dev/forkd/internal/config"
	"forkd.dev/forkd/internal/doctor"
)

// Main runs the command line args (without the program's name) with this
// process's streams and returns the exit code.
func Main(ctx context.Context, args []string, version string) int {
	dataDir := func(given string) string {
		if given == "" {
			given = configuredDir(os.Getenv)
		}
		if given != "" {
			return given
		}
		return DefaultDataDir(os.Getenv)
	}
	return cli.Run(ctx, args, cli.Env{
		Stdin: os.Stdin, Stdout: os.Stdout, Stderr: os.Stderr, Version: version,
		SystemConfig: config.SystemFile,
		StartPrivateDaemon: func(ctx context.Context, engine string) (string, func() error, error) {
			return startPrivate(ctx, dataDir(""), engine)
		},
		Serve: func(ctx context.Context, o cli.ServeOptions) error {
			opts := Options{ServeOptions: o, Version: version, Log: os.Stderr}
			if dir := os.Getenv(privateEnv); dir != "" {
				opts.DataDir, opts.Private, opts.Lifeline = dir, true, os.Stdin
				opts.Ready = func(socket string) { _, _ = fmt.Fprintln(os.Stdout, socket) }
			} else {
				opts.notify(newNotifier(os.Getenv))
			}
			opts.DataDir = dataDir(opts.DataDir)
			return Serve(ctx, opts)
		},
		Doctor: func(ctx context.Context, engine string) (cli.DoctorReport, error) {
			return diagnose(ctx, dataDir(""), engine)
		},
		Engines: func(ctx context.Context, engine string) (doctor.EngineList, error) {
			return listEngines(ctx, dataDir(""), engine)
		},
		InstallEngine: func(ctx context.Context, o cli.InstallOptions) (cli.Installed, error) {
			return installEngine(ctx, dataDir(""), o)
		},
		Cleanup: func(ctx context.Context, o cli.CleanupOptions) ([]string, error) {
			return cleanup(ctx, dataDir(o.DataDir), o.Apply)
		},
	})
}

// configuredDir returns the data directory that the environment or a file sets. The
// command line has told of bad files before.
func configuredDir(getenv func(string) string) string {
	c, err := config.Load(config.Sources{Getenv: getenv, Files: []string{config.SystemFile, config.UserFile(getenv)}})
	if err != nil {
		return ""
	}
	dir, err := config.Expand(c.Text("data_dir"))
	if err != nil {
		return ""
	}
	return dir
}
