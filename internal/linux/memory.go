package linux

import (
	"bufio"
	"bytes"
	"fmt"
	"os"
	"strconv"

	"forkd.dev/forkd/internal/errdefs"
)

// HostMemory is what /proc/meminfo says of the host.
type HostMemory struct {
	TotalKiB     int64
	AvailableKiB int64 // what new programs can use without swapping
	SwapTotalKiB int64
	SwapFreeKiB  int64
	ShmemKiB     int64
}

// ReadHostMemory reads /proc/meminfo.
func ReadHostMemory() (HostMemory, error) {
	b, err := os.ReadFile("/proc/meminfo")
	if err != nil {
		return HostMemory{}, fmt.Errorf("read host memory: %w", classify(err))
	}
	kib := parseKiBTable(b)
	m := HostMemory{
		TotalKiB:     kib["MemTotal"],
		AvailableKiB: kib["MemAvailable"],
		SwapTotalKiB: kib["SwapTotal"],
		SwapFreeKiB:  kib["SwapFree"],
		ShmemKiB:     kib["Shmem"],
	}
	if m.TotalKiB == 0 || m.AvailableKiB == 0 {
		return m, errdefs.New(errdefs.ErrUnsupported, "read host memory: /proc/meminfo lacks MemTotal or MemAvailable")
	}
	return m, nil
}

// ProcessMemory is the memory of one process.
type ProcessMemory struct {
	RSSKiB int64
	// PSSKiB counts a page shared by n processes as 1/n page.
	PSSKiB     int64
	PrivateKiB int64 // pages that no other process maps
	AnonKiB    int64
	SwapKiB    int64
}

// ReadProcessMemory sums /proc/PID/smaps. It walks the page tables of pid
// (milliseconds for a gigabyte), so it is for reports, not for tight loops.
func ReadProcessMemory(pid int) (ProcessMemory, error) {
	b, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/smaps_rollup")
	if err != nil {
		return ProcessMemory{}, fmt.Errorf("read memory of process %d: %w", pid, classify(err))
	}
	kib := parseKiBTable(b)
	return ProcessMemory{
		RSSKiB:     kib["Rss"],
		PSSKiB:     kib["Pss"],
		PrivateKiB: kib["Private_Clean"] + kib["Private_Dirty"],
		AnonKiB:    kib["Anonymous"],
		SwapKiB:    kib["Swap"],
	}, nil
}

// parseKiBTable reads lines "Name:   123 kB" and skips all others.
func parseKiBTable(b []byte) map[string]int64 {
	out := make(map[string]int64)
	sc := bufio.NewScanner(bytes.NewReader(b))
	for sc.Scan() {
		name, rest, ok := bytes.Cut(sc.Bytes(), []byte(":"))
		fields := bytes.Fields(rest)
		if !ok || len(fields) != 2 || string(fields[1]) != "kB" {
			continue
		}
		if v, err := strconv.ParseInt(string(fields[0]), 10, 64); err == nil && v >= 0 {
			out[string(name)] = v
		}
	}
	return out
}
