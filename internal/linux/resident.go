package linux

import (
	"bytes"
	"fmt"
	"os"
	"strconv"

	"forkd.dev/forkd/internal/errdefs"
)

// ReadPrivateKiB returns how much memory of pid belongs to no file: what a process
// wrote, itself or into private copies of mapped pages. It reads counters the
// kernel keeps (20 microseconds), unlike [ReadProcessMemory].
func ReadPrivateKiB(pid int) (int64, error) {
	b, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/statm")
	if err != nil {
		return 0, fmt.Errorf("read memory of process %d: %w", pid, classify(err))
	}
	resident, shared, err := parseStatm(b)
	if err != nil {
		return 0, fmt.Errorf("read memory of process %d: %w", pid, err)
	}
	return max(resident-shared, 0) * PageSize / 1024, nil
}

// parseStatm returns the second and third number of "size resident shared ...", in pages.
func parseStatm(b []byte) (resident, shared int64, err error) {
	fields := bytes.Fields(b)
	if len(fields) < 3 {
		return 0, 0, errdefs.New(errdefs.ErrUnsupported, "statm has %d fields", len(fields))
	}
	if resident, err = strconv.ParseInt(string(fields[1]), 10, 64); err == nil {
		shared, err = strconv.ParseInt(string(fields[2]), 10, 64)
	}
	if err != nil {
		return 0, 0, errdefs.New(errdefs.ErrUnsupported, "statm: %w", err)
	}
	return resident, shared, nil
}
