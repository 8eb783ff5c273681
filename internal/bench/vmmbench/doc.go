// Package vmmbench measures forkd-vmm without anything above it: no daemon, no agent, a
// guest of a few kilobytes (internal/tinyguest) that runs natively even where KVM emulates
// kernel code. It compares with bench/floor, a C program that does the same by the bare
// ioctls in one process, in the same run.
//
// One fork counts from the request, or for unpooled ones from before the start of
// the process, to the byte that the guest prints after it wrote ten inherited pages. The
// snapshot has 512 MiB of memory, 64 MiB of it written to. Processes are confined as for
// sandboxes as far as the user's rights go; as root each has its own uid.
package vmmbench
