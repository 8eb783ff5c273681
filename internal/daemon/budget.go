package daemon

import (
	"fmt"

	"forkd.dev/forkd/internal/config"
	"forkd.dev/forkd/internal/linux"
)

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
