package daemon

import (
	"context"
	"strings"

	"forkd.dev/forkd/internal/cli"
	"forkd.dev/forkd/internal/engine/gvisor"
	"forkd.dev/forkd/internal/engine/runsc"
	"forkd.dev/forkd/internal/errdefs"
	"forkd.dev/forkd/internal/image"
)

// installEngine gets the program of an engine into the data directory, for
// `forkd engine install`.
func installEngine(ctx context.Context, dataDir string, o cli.InstallOptions) (cli.Installed, error) {
	if o.Engine != gvisor.Name {
		return cli.Installed{}, errdefs.New(errdefs.ErrInvalid, "there is nothing to install for engine %.40q", o.Engine)
	}
	get := runsc.Debian
	if o.Newest {
		get = runsc.Newest
	}
	got, err := get(ctx, runsc.Config{
		DataDir: dataDir, Sources: backports(image.HostSources()), Progress: o.Progress,
		Check: func(dir string) (string, error) {
			_, version, err := gvisor.FindRunsc(dir)
			return version, err
		},
	})
	if err != nil {
		return cli.Installed{}, err
	}
	return cli.Installed{Engine: o.Engine, Path: got.Path, Version: got.Version, Source: got.Source}, nil
}

// backports turns the line of the archive, which is the first, into that of its backports.
func backports(sources []string) []string {
	for _, line := range sources {
		if archive, ok := strings.CutSuffix(line, " bookworm main"); ok {
			return []string{archive + " bookworm-backports main"}
		}
	}
	return nil
}
