// Command forkd-vmm is one virtual machine: a process that forkd starts, confines and
// talks to over a control socket. It is not started by hand.
package main

import (
	"os"

	"forkd.dev/forkd/internal/vmm/control"
)

// build is set by the linker.
var build = "devel"

func main() {
	if err := control.Run(os.Args[1:], build); err != nil {
		_, _ = os.Stderr.WriteString("forkd-vmm: " + err.Error() + "\n")
		os.Exit(1)
	}
}
