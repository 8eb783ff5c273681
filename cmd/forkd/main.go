// Command forkd is the daemon and the command line of forkd.
package main

import (
	"context"
	"os"

	"forkd.dev/forkd/internal/daemon"
)

// version is set by the build.
var version = "dev"

func main() { os.Exit(daemon.Main(context.Background(), os.Args[1:], version)) }
