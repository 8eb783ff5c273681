// The runtime would look for changed CPU limits every few seconds, in every idle
// sandbox, and none of them ever changes.

//go:debug updatemaxprocs=0
//go:debug containermaxprocs=0

// Command forkd-agent is forkd's program inside a sandbox: PID 1 of a virtual
// machine, or a process that serves the agent channel on inherited descriptors.
package main

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"syscall"

	"forkd.dev/forkd/internal/agent/guestboot"
)

func main() {
	if guestboot.Needed() {
		runMachine()
		return
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer stop()
	if err := runStream(ctx, os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "forkd-agent:", err)
		os.Exit(1)
	}
}
