// Package arch knows what an x86-64 machine looks like to its guest at start: address
// map, firmware tables, processor features, the kernel in memory, and the registers with
// which it begins.
//
// There is no firmware. Any vmlinux (ELF, 64-bit entry or PVH) or bzImage is put into
// memory and entered directly. The machine has no legacy devices but a serial port:
// hardware-reduced ACPI tells the guest of its processors, interrupt controller, the
// port, virtio-mmio devices, power-off and reset. (Stock kernels are built without MP
// tables and without device arguments on the command line; without ACPI they fall back to
// the 8259 and the PIT, which loses interrupts in nested virtualization.)
//
// The package only computes and writes bytes into guest memory; it makes no system call.
package arch
