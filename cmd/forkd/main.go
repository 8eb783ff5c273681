// Command forkd is the daemon and the command line of forkd.
package main

import (
	"context"
	"os"

	"forkd.dev/forkd/internal/daemon"
	"forkd.dev/forkd/internal/programs"
)

func main() { os.Exit(daemon.Main(context.Background(), os.Args[1:], programs.Version())) }
