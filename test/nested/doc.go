// Command nested runs tests of the kvm engine in a machine that has a real
// /dev/kvm: an L1 Linux under QEMU's emulation of a processor with AMD-V. The
// guests of our own VMM are then machines in a machine, and stock kernels boot in
// them, slowly. Nothing it measures is a speed.
//
// One boot of L1 serves all tests: they are compiled here, go to L1 on a disk made
// for the run together with the image they need, and are run by test/nested/init.
// Their output comes back over a virtio port and leaves on stdout as
// `go test -json` would print it. What L1's kernel says is in the work directory.
//
//	go run ./test/nested -kernel DIR [-only REGEXP] [-work DIR] [-v]
//
// DIR is an unpacked Debian package of a cloud kernel, 6.7 or newer for the page
// map scan; scripts/test-kvm.sh downloads it. Needs root (to build an image),
// qemu-system-x86 and e2fsprogs.
package main
