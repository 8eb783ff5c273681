package bench

import (
	"context"
	"os"
	"os/exec"
	"regexp"
	"runtime"
	"strconv"
	"strings"
	"time"
)

// Machine is where a measurement ran.
type Machine struct {
	CPU            string  `json:"cpu"`
	Cores          int     `json:"cores"`
	MemoryMiB      int     `json:"memory_mib"`
	OS             string  `json:"os"`
	Kernel         string  `json:"kernel"`
	Virtualization string  `json:"virtualization"` // what this host itself runs in
	KVM            bool    `json:"kvm"`            // there is a /dev/kvm
	QEMU           string  `json:"qemu"`
	Forkd          string  `json:"forkd"` // of the daemon
	Load1          float64 `json:"load1"` // before the measurement
	Date           string  `json:"date"`
}

// probeMachine looks at this host. What cannot be found out stays "unknown".
func probeMachine(ctx context.Context, cfg Config) Machine {
	const unknown = "unknown"
	fs := cfg.procfs()
	read := func(path string) string {
		raw, err := os.ReadFile(path)
		if err != nil {
			return ""
		}
		return string(raw)
	}
	or := func(s string) string {
		if s = strings.TrimSpace(s); s == "" {
			return unknown
		}
		return s
	}
	m := Machine{
		CPU:            or(field(read(string(fs)+"/cpuinfo"), "model name")),
		Cores:          runtime.NumCPU(),
		OS:             or(strings.Trim(assigned(read("/etc/os-release"), "PRETTY_NAME"), `"`)),
		Kernel:         or(read(string(fs) + "/sys/kernel/osrelease")),
		Virtualization: or(virtualization(ctx)),
		QEMU:           or(version(ctx, "qemu-system-x86_64")),
		Forkd:          unknown,
		Date:           time.Now().UTC().Format(time.RFC3339),
	}
	kib, _, _ := strings.Cut(field(read(string(fs)+"/meminfo"), "MemTotal"), " ")
	total, _ := strconv.Atoi(kib) // 0 says unknown
	m.MemoryMiB = total / 1024
	load, _, _ := strings.Cut(read(string(fs)+"/loadavg"), " ")
	m.Load1, _ = strconv.ParseFloat(load, 64) // likewise
	_, err := os.Stat("/dev/kvm")
	m.KVM = err == nil
	if v, err := cfg.Client.Version(ctx); err == nil {
		m.Forkd = v.Version
	}
	return m
}

// field returns the value of the first line "name : value".
func field(text, name string) string {
	for line := range strings.Lines(text) {
		if key, value, ok := strings.Cut(line, ":"); ok && strings.TrimSpace(key) == name {
			return strings.TrimSpace(value)
		}
	}
	return ""
}

// assigned returns the value of the first line "name=value".
func assigned(text, name string) string {
	for line := range strings.Lines(text) {
		if key, value, ok := strings.Cut(line, "="); ok && key == name {
			return strings.TrimSpace(value)
		}
	}
	return ""
}

func virtualization(ctx context.Context) string {
	// It fails with the answer "none" on bare metal.
	out, _ := exec.CommandContext(ctx, "systemd-detect-virt").Output()
	return string(out)
}

// version returns the first version number that a program tells of itself.
func version(ctx context.Context, program string) string {
	out, err := exec.CommandContext(ctx, program, "--version").Output()
	if err != nil {
		return ""
	}
	return regexp.MustCompile(`[0-9]+\.[0-9]+(\.[0-9]+)?`).FindString(string(out))
}
