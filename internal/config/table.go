package config

import (
	"errors"
	"fmt"
	"net"
	"path/filepath"
	"strconv"
	"strings"

	"forkd.dev/forkd/internal/errdefs"
)

// Table lists all settings.
//
//archtest:table one row for each setting
func Table() []Setting {
	return []Setting{
		{Key: "url", Flag: "url", Alias: "daemon-url", Env: "FORKD_URL", Scope: Client,
			Default: "looked for: the user's socket, the system's socket, http://127.0.0.1:8889",
			Help:    "address of the daemon: http://HOST:PORT or unix:///PATH"},
		{Key: "token", Flag: "daemon-token", Env: "FORKD_TOKEN", Scope: Client, Secret: true,
			Help: "bearer token; the environment keeps it out of the process list"},
		{Key: "bind", Flag: "bind", Alias: "listen", Env: "FORKD_BIND", Scope: Daemon, Kind: List, Default: "127.0.0.1:8889",
			Help: "TCP address to listen on (repeatable)", check: checkAddress},
		{Key: "data_dir", Flag: "data-dir", Env: "FORKD_DATA_DIR", Scope: Daemon,
			Default: "/var/lib/forkd for root, else $XDG_DATA_HOME/forkd",
			Help:    "where everything is kept", check: checkAbsolute},
		{Key: "token_file", Flag: "token-file", Env: "FORKD_TOKEN_FILE", Scope: Daemon,
			Help: "file with the bearer token that clients must send"},
		{Key: "prepare", Flag: "prepare", Env: "FORKD_PREPARE", Scope: Daemon, Kind: List,
			Help: "built-in snapshots to make ready, e.g. py-base"},
		{Key: "max_sandboxes", Flag: "max-sandboxes", Env: "FORKD_MAX_SANDBOXES", Scope: Daemon, Kind: Number, Default: "2000",
			Help: "limit of sandboxes at once", check: checkCount},
		{Key: "memory_budget", Flag: "memory-budget", Env: "FORKD_MEMORY_BUDGET", Scope: Daemon, Default: "80%",
			Help: "memory that all sandboxes together may use: a share of the host's as 80%, or 8192 or 8G (MiB)", check: checkBudget},
		{Key: "resident_max", Flag: "resident-max", Env: "FORKD_RESIDENT_MAX", Scope: Daemon, Default: "25%",
			Help: "memory for images of snapshots that no sandbox maps at the moment: a share of the host's as 25%, or 2048 or 2G (MiB)", check: checkBudget},
		{Key: "min_free", Flag: "min-free", Env: "FORKD_MIN_FREE", Scope: Daemon, Default: "1G",
			Help: "disk space that stays free, below which captures and builds are refused: 1024 or 1G (MiB); 0 keeps none", check: checkAmount},
		{Key: "engine", Flag: "engine", Env: "FORKD_ENGINE", Scope: Daemon, Default: "auto",
			Help: "what runs sandboxes: auto, kvm, gvisor or qemu; see forkd engine ls", check: checkEngine},
		{Key: "allow_host", Flag: "allow-host", Env: "FORKD_ALLOW_HOST", Scope: Daemon, Kind: List,
			Help: "further Host name to accept on loopback without a token (repeatable)"},
		{Key: "log_level", Flag: "log-level", Env: "FORKD_LOG_LEVEL", Scope: Daemon, Default: "info",
			Help: "debug, info, warn or error", check: checkLevel},
	}
}

func checkAddress(text string) error {
	if _, _, err := net.SplitHostPort(text); err != nil {
		return fmt.Errorf("%.80q is not host:port", text)
	}
	return nil
}

func checkAbsolute(text string) error {
	if text == "" || strings.ContainsRune(text, 0) {
		return errors.New("it is no path")
	}
	return nil
}

// maxCount is far more than a host can run, and fits every int.
const maxCount = 1 << 24

func checkCount(text string) error {
	n, err := strconv.Atoi(text)
	switch {
	case err != nil:
		return fmt.Errorf("%.40q is not a number", text)
	case n < 0:
		return fmt.Errorf("%d is negative", n)
	case n > maxCount:
		return fmt.Errorf("%d is more than %d", n, maxCount)
	}
	return nil
}

func checkEngine(text string) error {
	switch text {
	case "auto", "kvm", "gvisor", "qemu":
		return nil
	}
	return errdefs.WithHint(fmt.Errorf("there is no engine %.40q", text), "use auto, kvm, gvisor or qemu; forkd engine ls tells which work here")
}

func checkLevel(text string) error {
	switch strings.ToLower(text) {
	case "debug", "info", "warn", "error":
		return nil
	}
	return fmt.Errorf("%.40q is not debug, info, warn or error", text)
}

func checkBudget(text string) error {
	_, err := ParseBudget(text)
	return err
}

func checkAmount(text string) error {
	_, err := ParseAmount(text)
	return err
}

// ParseAmount reads "0", "1024" (MiB), "1G" and returns MiB.
func ParseAmount(text string) (int, error) {
	if text == "0" {
		return 0, nil
	}
	b, err := ParseBudget(text)
	if err != nil || b.Percent > 0 {
		return 0, fmt.Errorf("%.40q is no amount: write 0, 1024 or 1G", text)
	}
	return b.MiB, nil
}

// Budget is an amount of memory: a share of the host's, or MiB.
type Budget struct {
	Percent int // if not 0
	MiB     int
}

// Of returns the budget in MiB on a host with totalMiB.
func (b Budget) Of(totalMiB int) int {
	if b.Percent > 0 {
		return totalMiB * b.Percent / 100
	}
	return b.MiB
}

// ParseBudget reads "80%", "8192" (MiB), "8G".
func ParseBudget(text string) (Budget, error) {
	bad := fmt.Errorf("%.40q is no amount of memory: write 80%%, 8192 or 8G", text)
	if digits, ok := strings.CutSuffix(text, "%"); ok {
		n, err := strconv.Atoi(digits)
		if err != nil || n < 1 || n > 100 {
			return Budget{}, fmt.Errorf("%.40q is not between 1%% and 100%%", text)
		}
		return Budget{Percent: n}, nil
	}
	factor := 1
	for _, unit := range []struct {
		suffix string
		factor int
	}{{"MiB", 1}, {"GiB", 1024}, {"TiB", 1 << 20}, {"M", 1}, {"G", 1024}, {"T", 1 << 20}} {
		if digits, ok := strings.CutSuffix(text, unit.suffix); ok {
			text, factor = digits, unit.factor
			break
		}
	}
	n, err := strconv.Atoi(text)
	if err != nil || n <= 0 || n > (1<<30)/factor {
		return Budget{}, bad
	}
	return Budget{MiB: n * factor}, nil
}

// Expand makes a data directory absolute: the daemon does not stay where it was started.
func Expand(path string) (string, error) {
	if path == "" {
		return "", nil
	}
	abs, err := filepath.Abs(path)
	if err != nil {
		return "", fmt.Errorf("data directory %s: %w", path, err)
	}
	return abs, nil
}
