package daemon

import (
	"fmt"

	"forkd.dev/forkd/internal/config"
	"forkd.dev/forkd/internal/linux"
)

// defaultResidentPercent of the host's memory may hold images that nothing maps.
const defaultResidentPercent = 25

// residentMax turns a setting into bytes.
func residentMax(b config.Budget) (int64, error) {
	if b == (config.Budget{}) {
		b.Percent = defaultResidentPercent
	}
	mib, err := memoryBudget(b)
	return int64(mib) << 20, err
}

// minFree turns a setting into bytes as the service takes them: 0 is its default,
// less is nothing.
func minFree(mib *int) int64 {
	switch {
	case mib == nil:
		return 0
	case *mib == 0:
		return -1
	}
	return int64(*mib) << 20
}

// memoryBudget turns a setting into MiB; 0 is the service's default.
func memoryBudget(b config.Budget) (int, error) {
	if b == (config.Budget{}) {
		return 0, nil
	}
	host, err := linux.ReadHostMemory()
	if err != nil {
		return 0, fmt.Errorf("set memory budget: %w", err)
	}
	return b.Of(int(host.TotalKiB / 1024)), nil
}
