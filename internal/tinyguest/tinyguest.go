// Package tinyguest is a guest of a few kilobytes for tests and benchmarks of virtual
// machines: an ELF kernel that enters ring 3 at once and does what its command line says
// (source/main.c lists the words). It runs natively even where KVM emulates kernel code.
//
// build.sh makes guest.elf from source/.
package tinyguest

import _ "embed"

//go:embed guest.elf
var elf []byte

// ELF returns the kernel. It is read only.
func ELF() []byte { return elf }

// What the guest prints.
const (
	Ready   = '#' // start-up is done
	Resumed = '@' // runs again after a restore
)
