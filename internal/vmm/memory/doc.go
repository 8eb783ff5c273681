// Package memory is the guest-physical memory of one machine.
//
// A [Space] is one private mapping of the process. Its pages come from the files of
// layers, mapped copy-on-write where a run is long enough to be worth a mapping and
// copied where not, and from zeros. What the guest writes becomes a private page of
// this process; nothing can change a file, which is sealed or opened for reading.
//
// Two orders exist. A page number counts in the order of the memory's bytes (and of
// layer files). An [Address] is what the guest sees: memory beyond 3 GiB starts at
// 4 GiB, because interrupt controllers and devices live between. Only Slice, ReadAt
// and WriteAt turn an address into bytes, after a check that cannot overflow.
//
// Bytes of a slice are shared with vCPUs that run: whoever reads a structure copies
// it first and checks the copy (no double fetch).
//
// A Space is safe for concurrent use by devices; the calls that change the mapping
// (Restore, Rollback, Close) are made while no vCPU runs and no device works.
package memory
