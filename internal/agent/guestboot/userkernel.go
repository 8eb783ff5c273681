package guestboot

import (
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// SettleUserKernel readies a sandbox on a user-space kernel, which has mounted what
// it has already. It returns what failed without being needed.
func SettleUserKernel() (warnings []string) {
	if err := unix.SetNonblock(unix.Stderr, true); err != nil {
		warnings = append(warnings, "console: "+err.Error())
	}
	for _, dir := range []string{"/run/lock", "/tmp"} {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			warnings = append(warnings, err.Error())
		}
	}
	if err := os.Chmod("/tmp", 0o777|os.ModeSticky); err != nil {
		warnings = append(warnings, err.Error())
	}
	return warnings
}

// SayWithoutWaiting prints a line to descriptor 2, or drops it if nobody reads there:
// the agent must not stand still because no daemon runs.
func SayWithoutWaiting(line string) {
	_, _ = unix.Write(unix.Stderr, fmt.Appendf(nil, "forkd-agent: %.800s\n", line))
}
