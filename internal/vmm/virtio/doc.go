// Package virtio is the part that all virtio devices of a machine share: split
// virtqueues and the memory-mapped transport (virtio 1.2, sections 2.7 and 4.2,
// transport version 2).
//
// A [Transport] is one device as the guest sees it: a window of [WindowSize] bytes of
// registers, an interrupt, a doorbell. Behind it stands a [Device], which knows what
// the requests mean. Packages below internal/vmm/devices are the devices.
//
//	guest writes a register  -> Transport.Write   (vCPU thread, after an MMIO exit)
//	guest rings the doorbell -> Transport.Serve   (goroutine that reads an ioeventfd)
//	host has something       -> Transport.Kick    (goroutine of the device)
//	device used a buffer     -> Interrupter.Raise (irqfd)
//
// # Trust
//
// Everything in guest memory and every register write is hostile. A descriptor is
// copied once and the copy is checked; chains are bounded by the length of the queue
// (1,024 descriptors with an indirect table), so loops end; every address goes through
// [GuestMemory]. What breaks the rules of the specification puts the device into
// DEVICE_NEEDS_RESET with a reason ([Transport.Failure]); until the guest resets the
// device, it does nothing. A device works on at most one queue length of requests
// before it lets go of its lock, so that a guest which refills its queue for ever
// hinders nobody.
//
// Guest memory changes while it is read. The bytes of a [Chain] are guest memory
// itself: a device copies what it decides on.
//
// # Locking
//
// One mutex per Transport guards the registers, the queues and the device; all methods
// of Device are called with it held. Only the interrupt status is outside of it, so
// that an interrupt handler never waits for a disk. A Device may take locks of its own
// inside; it must not call Kick, Pause or Resume with the Transport's lock held.
//
// # Pause and state
//
// A Transport starts paused. Between Pause and Resume the device neither touches guest
// memory nor takes anything from the host. No request is ever half done over a pause:
// a chain that a device could not finish is given back to its queue ([Queue.Return]),
// and how far it came is device state. So AppendState holds queue positions, registers
// and the device's own state, and a machine restored from it goes on exactly there. Interrupts
// that were raised and not acknowledged are raised again by Resume.
package virtio
