package agent

import (
	"bytes"
	"strconv"

	"golang.org/x/sys/unix"
)

const (
	scrubChunk = 8 << 20
	// scrubReserve stays free, so that scrubbing takes no page from anybody.
	scrubReserve = 24 << 20
)

// scrubFreeMemory makes the kernel zero its free pages, by asking for them and
// giving them back. A build leaves them full of what it downloaded and of the
// settings it was given: a capture would store all of that. It does what it can.
func scrubFreeMemory() {
	var taken [][]byte
	defer func() {
		for _, m := range taken {
			unix.Munmap(m)
		}
	}()
	for freeMemory() > scrubReserve+scrubChunk {
		m, err := unix.Mmap(-1, 0, scrubChunk, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|unix.MAP_POPULATE)
		if err != nil {
			return
		}
		taken = append(taken, m)
	}
}

// freeMemory returns the bytes that are free and hold no cache, or 0.
func freeMemory() int64 {
	b, err := readLimited("/proc/meminfo", 8<<10)
	if err != nil {
		return 0
	}
	_, rest, found := bytes.Cut(b, []byte("MemFree:"))
	if !found {
		return 0
	}
	fields := bytes.Fields(rest)
	if len(fields) == 0 {
		return 0
	}
	kib, err := strconv.ParseInt(string(fields[0]), 10, 64)
	if err != nil {
		return 0
	}
	return kib << 10
}
