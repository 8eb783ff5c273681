package gvisor

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"

	"forkd.dev/forkd/internal/engine"
)

// The parts of an OCI runtime bundle (opencontainers/runtime-spec, config.md) that a
// sandbox needs.
type (
	bundleConfig struct {
		Version     string            `json:"ociVersion"`
		Process     bundleProcess     `json:"process"`
		Root        bundleRoot        `json:"root"`
		Hostname    string            `json:"hostname"`
		Mounts      []bundleMount     `json:"mounts"`
		Linux       bundleLinux       `json:"linux"`
		Annotations map[string]string `json:"annotations,omitempty"`
	}
	bundleProcess struct {
		User         struct{ UID, GID int } `json:"user"`
		Args         []string               `json:"args"`
		Env          []string               `json:"env"`
		Cwd          string                 `json:"cwd"`
		Capabilities map[string][]string    `json:"capabilities"`
		Rlimits      []bundleRlimit         `json:"rlimits"`
		OOMScoreAdj  int                    `json:"oomScoreAdj"`
	}
	bundleRlimit struct {
		Type string `json:"type"`
		Hard uint64 `json:"hard"`
		Soft uint64 `json:"soft"`
	}
	bundleRoot struct {
		Path     string `json:"path"`
		Readonly bool   `json:"readonly"`
	}
	bundleMount struct {
		Destination string   `json:"destination"`
		Type        string   `json:"type"`
		Source      string   `json:"source"`
		Options     []string `json:"options,omitempty"`
	}
	bundleLinux struct {
		Namespaces  []bundleNamespace `json:"namespaces"`
		UIDMappings []bundleMapping   `json:"uidMappings,omitempty"`
		GIDMappings []bundleMapping   `json:"gidMappings,omitempty"`
		Resources   bundleResources   `json:"resources"`
	}
	bundleNamespace struct {
		Type string `json:"type"`
	}
	bundleMapping struct {
		ContainerID int `json:"containerID"`
		HostID      int `json:"hostID"`
		Size        int `json:"size"`
	}
	bundleResources struct {
		CPU    bundleCPU    `json:"cpu"`
		Memory bundleMemory `json:"memory"`
	}
	bundleCPU struct {
		Quota  int `json:"quota"`
		Period int `json:"period"`
	}
	bundleMemory struct {
		Limit int64 `json:"limit"`
	}
)

// Names inside of a bundle and of a sandbox.
const (
	bundleDir  = "bundle"
	emptyRoot  = "root" // beside the agent's directory
	agentHome  = "init"
	agentDir   = "/.forkd"
	agentFile  = "agent"
	cpuPeriod  = 100_000 // microseconds
	oomScore   = 500     // under memory pressure a sandbox goes before the daemon does
	openFiles  = 1 << 20
	openFilesS = 1 << 10
)

// capabilities are those that init has inside of the sandbox, where only the
// user-space kernel honours them: all that it knows.
func capabilities() []string {
	return []string{
		"CAP_AUDIT_WRITE", "CAP_CHOWN", "CAP_DAC_OVERRIDE", "CAP_DAC_READ_SEARCH", "CAP_FOWNER", "CAP_FSETID", "CAP_IPC_LOCK", "CAP_IPC_OWNER",
		"CAP_KILL", "CAP_LEASE", "CAP_LINUX_IMMUTABLE", "CAP_MKNOD", "CAP_NET_ADMIN", "CAP_NET_BIND_SERVICE", "CAP_NET_BROADCAST", "CAP_NET_RAW",
		"CAP_SETFCAP", "CAP_SETGID", "CAP_SETPCAP", "CAP_SETUID", "CAP_SYS_ADMIN", "CAP_SYS_BOOT", "CAP_SYS_CHROOT", "CAP_SYS_NICE",
		"CAP_SYS_PTRACE", "CAP_SYS_RESOURCE", "CAP_SYS_TIME", "CAP_SYS_TTY_CONFIG",
	}
}

// bundle is what one sandbox's bundle differs in.
type bundle struct {
	dir   string // of the machine
	stage string // directory that holds emptyRoot and agentHome, as runsc sees it
	root  engine.Root
	shape engine.Shape
	uid   int // that the sandbox's root is on the host; 0 leaves that to runsc
}

// write makes the bundle in the machine's directory.
func (b bundle) write() error {
	dir := filepath.Join(b.dir, bundleDir)
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return fmt.Errorf("write bundle: %w", err)
	}
	text, err := json.Marshal(b.config())
	if err != nil {
		return fmt.Errorf("write bundle: %w", err)
	}
	if err := os.WriteFile(filepath.Join(dir, "config.json"), text, 0o644); err != nil {
		return fmt.Errorf("write bundle: %w", err)
	}
	return nil
}

func (b bundle) config() bundleConfig {
	caps := capabilities()
	c := bundleConfig{
		Version: "1.0.2",
		Process: bundleProcess{
			Args: []string{agentDir + "/" + agentFile, "-user-kernel", "-fd", "0,1"},
			Env:  []string{"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}, Cwd: "/",
			Capabilities: map[string][]string{"bounding": caps, "effective": caps, "permitted": caps, "inheritable": caps},
			Rlimits:      []bundleRlimit{{Type: "RLIMIT_NOFILE", Hard: openFiles, Soft: openFilesS}},
			OOMScoreAdj:  oomScore,
		},
		Root:     bundleRoot{Path: filepath.Join(b.stage, emptyRoot)},
		Hostname: "forkd",
		Mounts: []bundleMount{
			{Destination: "/proc", Type: "proc", Source: "proc"},
			{Destination: "/sys", Type: "sysfs", Source: "sysfs", Options: []string{"nosuid", "noexec", "nodev"}},
			{Destination: "/run", Type: "tmpfs", Source: "tmpfs", Options: []string{"nosuid", "nodev", "mode=755"}},
			{Destination: agentDir, Type: "bind", Source: filepath.Join(b.stage, agentHome), Options: []string{"ro", "bind"}},
		},
		Linux: bundleLinux{
			Namespaces: []bundleNamespace{{"pid"}, {"mount"}, {"ipc"}, {"uts"}, {"network"}},
			Resources: bundleResources{
				CPU:    bundleCPU{Quota: b.shape.CPUs * cpuPeriod, Period: cpuPeriod},
				Memory: bundleMemory{Limit: int64(b.shape.MemoryMiB) << 20},
			},
		},
	}
	if b.root.Tree != "" {
		c.Annotations = map[string]string{
			"dev.gvisor.spec.rootfs.source":  b.root.Tree,
			"dev.gvisor.spec.rootfs.type":    "erofs",
			"dev.gvisor.spec.rootfs.overlay": "memory",
		}
	}
	if b.uid != 0 {
		own := []bundleMapping{{ContainerID: 0, HostID: b.uid, Size: 1}}
		c.Linux.Namespaces = append(c.Linux.Namespaces, bundleNamespace{"user"})
		c.Linux.UIDMappings, c.Linux.GIDMappings = own, own
	}
	return c
}
