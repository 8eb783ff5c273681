// Package gvisor is the engine that runs sandboxes under gVisor's runsc: a
// user-space kernel instead of a virtual machine, for hosts without usable KVM.
package gvisor
