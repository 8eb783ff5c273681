package doctor

import (
	"context"
	"encoding/json"
	"errors"
	"os"
	"strings"
	"testing"
	"time"

	"forkd.dev/forkd/internal/engine"
	"forkd.dev/forkd/internal/errdefs"
	"forkd.dev/forkd/internal/linux"
	"forkd.dev/forkd/internal/linux/cgroup"
)

const gib = 1 << 30

// goodHost has nothing to complain about.
func goodHost() Input {
	return Input{
		Facts: Facts{
			OS: "linux", Arch: "amd64", Distribution: "Debian GNU/Linux 12 (bookworm)", Cores: 8,
			CPU:    linux.CPU{Model: "Test CPU", Flags: map[string]bool{"vmx": true}},
			KVM:    linux.KVMSpeed{Instructions: 600_000_000, Took: 100 * time.Millisecond},
			Kernel: "6.12.1",
			Cgroups: cgroup.Layout{Mode: cgroup.ModeV2, Hierarchies: []cgroup.Hierarchy{
				{Version: 2, Mount: "/sys/fs/cgroup", Own: "/", Controllers: []string{"cpu", "memory", "pids"}, Writable: true},
			}},
			Memory:    linux.HostMemory{TotalKiB: 64 << 20, AvailableKiB: 60 << 20},
			Disk:      linux.Disk{Path: "/data", TotalBytes: 100 * gib, AvailableBytes: 50 * gib, AvailableFiles: -1},
			Shm:       linux.Disk{Path: "/dev/shm", AvailableBytes: gib},
			FreeTasks: 30000, FileLimit: 1 << 20,
			Tools: map[string]Tool{
				"qemu-system-x86_64": {Path: "/q", Version: "QEMU emulator version 7.2"},
				"mmdebstrap":         {Path: "/m", Version: "mmdebstrap 1.3"},
				"mke2fs":             {Path: "/e", Version: "mke2fs 1.47"},
				"dpkg-deb":           {Path: "/d", Version: "dpkg-deb 1.21"},
				"runc":               {Path: "/r", Version: "runc 1.1"},
			},
		},
		Engines: []Engine{{Name: "qemu", Ready: true, Probe: engine.Probe{
			Available: true, SharesMemory: true, Version: "QEMU 7.2", Accelerator: "kvm", Isolation: engine.IsolationHardware, Confinement: []string{"seccomp"},
		}}},
		DataDir:   "/data",
		Daemon:    func(context.Context) (string, error) { return "1.0", nil },
		Leftovers: func(context.Context) ([]string, error) { return nil, nil },
	}
}

func TestGoodHostPasses(t *testing.T) {
	r := Run(t.Context(), goodHost())
	for _, c := range r.Checks {
		if c.Status != Pass || c.Remedy != "" {
			t.Errorf("%+v", c)
		}
	}
	if r.Failed() || r.Engine.Auto != "qemu" {
		t.Errorf("failed=%v, engine %+v", r.Failed(), r.Engine)
	}
}

func TestVerdicts(t *testing.T) {
	unavailable := errdefs.ErrUnavailable
	for name, c := range map[string]struct {
		change func(in *Input)
		check  string
		want   Status
		detail string
	}{
		"other system":    {func(in *Input) { in.Facts.OS = "darwin" }, "platform", Fail, "darwin"},
		"other Linux":     {func(in *Input) { in.Facts.Distribution = "Fedora 40" }, "platform", Warn, "Fedora 40"},
		"other processor": {func(in *Input) { in.Facts.Arch = "arm64" }, "architecture", Fail, "arm64"},
		"no flag":         {func(in *Input) { in.Facts.CPU.Flags = nil }, "cpu-virtualization", Warn, "neither vmx nor svm"},
		"no flag in a VM": {func(in *Input) { in.Facts.CPU.Flags = map[string]bool{"hypervisor": true} }, "cpu-virtualization", Warn, "virtual machine"},
		"no kvm":          {func(in *Input) { in.Facts.KVMErr = errdefs.WithHint(errdefs.ErrNotFound, "load it") }, "kvm", Warn, "not found"},
		"slow kvm":        {func(in *Input) { in.Facts.KVM.Instructions = 140_000 }, "kvm", Warn, "1.4 million instructions/s: emulated"},
		"no engine":       {func(in *Input) { in.Engines[0].Probe = engine.Probe{Reason: "no QEMU", Remedy: "install it"} }, "engine", Fail, "no QEMU"},
		"no driver":       {func(in *Input) { in.Engines = nil }, "engine", Fail, "the qemu engine is not part of this version"},
		"the set one": {func(in *Input) {
			in.Setting, in.Engines = "gvisor", append(in.Engines, Engine{Name: "gvisor", Probe: engine.Probe{Available: true, Version: "runsc 1", Isolation: engine.IsolationUserKernel}})
		}, "engine", Pass, "gvisor is set (auto = qemu) (runsc 1, ), isolation user-kernel; each fork is a full copy of the memory"},
		"the set one's isolation": {func(in *Input) {
			in.Setting, in.Engines = "gvisor", append(in.Engines, Engine{Name: "gvisor", Probe: engine.Probe{Available: true, Isolation: engine.IsolationUserKernel}})
		}, "isolation", Pass, "a kernel in user space answers all system calls"},
		"the set one is broken": {func(in *Input) {
			in.Setting, in.Engines = "gvisor", append(in.Engines, Engine{Name: "gvisor", Probe: engine.Probe{Reason: "runsc is too old", Remedy: "get another"}})
		}, "engine", Fail, "gvisor is set and cannot run here: runsc is too old"},
		"none of that name": {func(in *Input) { in.Setting = "vmware" }, "engine", Fail, `"vmware"`},
		"auto is set":       {func(in *Input) { in.Setting = "auto" }, "engine", Pass, "auto = qemu"},
		"another engine works": {func(in *Input) {
			in.Engines = append(in.Engines, Engine{Name: "gvisor", Probe: engine.Probe{Available: true, Version: "runsc 1", Accelerator: "systrap"}})
		}, "engine-gvisor", Pass, "works here: runsc 1, systrap"},
		"another engine does not": {func(in *Input) {
			in.Engines = append(in.Engines, Engine{Name: "gvisor", Probe: engine.Probe{Reason: "runsc is not installed", Remedy: "install it"}})
		}, "engine-gvisor", Skip, "runsc is not installed"},
		"emulation":         {func(in *Input) { in.Engines[0].Probe.Isolation = engine.IsolationEmulated }, "isolation", Warn, "calls emulation no security boundary"},
		"lost confinement":  {func(in *Input) { in.Engines[0].Probe.Lost = []string{"uid"} }, "isolation", Warn, "lost: uid"},
		"no isolation":      {func(in *Input) { in.Engines = nil }, "isolation", Skip, "no engine"},
		"old kernel":        {func(in *Input) { in.Facts.Features.Pidfd = errdefs.ErrUnsupported }, "kernel", Fail, "lacks"},
		"optional features": {func(in *Input) { in.Facts.Features.PagemapScan = errdefs.ErrUnsupported }, "kernel", Pass, "no PAGEMAP_SCAN"},
		"no cgroups":        {func(in *Input) { in.Facts.Cgroups = cgroup.Layout{Mode: cgroup.ModeNone} }, "cgroups", Warn, "cannot be applied"},
		"cgroups read-only": {func(in *Input) { in.Facts.Cgroups.Hierarchies[0].Writable = false }, "cgroups", Warn, "none"},
		"ordinary user":     {func(in *Input) { in.Facts.UID = 1000 }, "user", Warn, "uid 1000"},
		"memory binds":      {func(in *Input) { in.Facts.Memory.AvailableKiB = 12 << 20 }, "memory", Fail, "limited by memory"},
		"few fit":           {func(in *Input) { in.Facts.FreeTasks = 50 }, "memory", Warn, "about 8 more forks of py-base fit (26 MiB each), limited by processes"},
		"descriptors bind":  {func(in *Input) { in.Facts.FileLimit = 864 }, "memory", Pass, "about 100 more forks of py-base fit (26 MiB each), limited by descriptors"},
		"own limit binds":   {func(in *Input) { in.Sizing.MaxSandboxes = 20 }, "memory", Pass, "about 20 more"},
		"disk full":         {func(in *Input) { in.Facts.Disk.AvailableBytes = gib / 2 }, "disk", Fail, "512 MiB"},
		"no inodes":         {func(in *Input) { in.Facts.Disk.AvailableFiles = 0 }, "disk", Fail, "/data"},
		"little disk":       {func(in *Input) { in.Facts.Disk.AvailableBytes = 2 * gib }, "disk", Warn, "2.0 GiB"},
		"data dir to come":  {func(in *Input) { in.DataDir = "/data/new" }, "disk", Pass, "/data/new does not exist yet"},
		"no shm":            {func(in *Input) { in.Facts.ShmErr = errdefs.ErrNotFound }, "shared-memory", Warn, "not found"},
		"no tool":           {func(in *Input) { delete(in.Facts.Tools, "mke2fs") }, "tool-mke2fs", Fail, "not installed"},
		"broken tool":       {func(in *Input) { in.Facts.Tools["mke2fs"] = Tool{Path: "/x", Err: unavailable} }, "tool-mke2fs", Fail, "unavailable"},
		"no optional tool":  {func(in *Input) { delete(in.Facts.Tools, "runc") }, "tool-runc", Skip, "benchmarks"},
		"no daemon":         {func(in *Input) { in.Daemon = func(context.Context) (string, error) { return "", unavailable } }, "daemon", Skip, "no daemon"},
		"sick daemon":       {func(in *Input) { in.Daemon = func(context.Context) (string, error) { return "", errdefs.ErrTimeout } }, "daemon", Warn, "timed out"},
		"daemon not asked":  {func(in *Input) { in.Daemon = nil }, "daemon", Skip, "not asked"},
		"leftovers": {func(in *Input) {
			in.Leftovers = func(context.Context) ([]string, error) { return strings.Fields("a b c d e f g"), nil }
		}, "leftovers", Warn, "7 of earlier runs: a, b, c, d, e and 2 more"},
		"leftovers unknown": {func(in *Input) {
			in.Leftovers = func(context.Context) ([]string, error) { return nil, errors.New("no") }
		}, "leftovers", Warn, "no"},
		"leftovers not asked": {func(in *Input) { in.Leftovers = nil }, "leftovers", Skip, "not asked"},
	} {
		t.Run(name, func(t *testing.T) {
			in := goodHost()
			c.change(&in)
			r := Run(t.Context(), in)
			checkInvariants(t, r)
			got := byName(t, r, c.check)
			if got.Status != c.want || !strings.Contains(got.Detail, c.detail) {
				t.Errorf("got %+v, want %s with %q", got, c.want, c.detail)
			}
			if r.Failed() != (r.count(Fail) > 0) || (c.want == Fail && !r.Failed()) {
				t.Error("Failed does not tell the failure")
			}
		})
	}
}

func byName(t *testing.T, r Report, name string) Check {
	t.Helper()
	for _, c := range r.Checks {
		if c.Name == name {
			return c
		}
	}
	t.Fatalf("no check %s", name)
	return Check{}
}

// checkInvariants: names are unique, texts are one line, whoever does not pass has a remedy.
func checkInvariants(t *testing.T, r Report) {
	t.Helper()
	seen := make(map[string]bool)
	for _, c := range r.Checks {
		if seen[c.Name] {
			t.Errorf("check %s stands twice", c.Name)
		}
		seen[c.Name] = true
		if c.Detail == "" || strings.Contains(c.Detail+c.Remedy, "\n") {
			t.Errorf("check %s: detail %q, remedy %q: want one line each", c.Name, c.Detail, c.Remedy)
		}
		if (c.Status == Pass) != (c.Remedy == "") {
			t.Errorf("check %s is %s with remedy %q", c.Name, c.Status, c.Remedy)
		}
	}
}

func TestAuto(t *testing.T) {
	fast := goodHost().Facts
	slow := fast
	slow.KVM.Instructions = 140_000
	available := engine.Probe{Available: true, Accelerator: "tcg"}
	for name, c := range map[string]struct {
		facts   Facts
		engines []Engine
		want    Choice
	}{
		"this version on slow kvm": {slow, []Engine{{"qemu", true, available}}, Choice{Auto: "qemu", Reason: "/dev/kvm runs kernel code at 1.4 million instructions/s: emulated; the kvm engine is not part of this version; the gvisor engine is not part of this version; so qemu with TCG"}},
		"kvm":                      {fast, []Engine{{"qemu", true, available}, {"kvm", true, engine.Probe{Available: true}}}, Choice{Auto: "kvm", Reason: "/dev/kvm runs kernel code at full speed (6000 million instructions/s); so kvm"}},
		"slow kvm, all built":      {slow, []Engine{{"qemu", true, available}, {"kvm", true, available}, {"gvisor", true, engine.Probe{Available: true, Accelerator: "systrap"}}}, Choice{Auto: "gvisor", Reason: "/dev/kvm runs kernel code at 1.4 million instructions/s: emulated; kvm is not worth it here; so gvisor with SYSTRAP"}},
		"none":                     {slow, []Engine{{"qemu", true, engine.Probe{Reason: "no QEMU"}}}, Choice{Reason: "/dev/kvm runs kernel code at 1.4 million instructions/s: emulated; the kvm engine is not part of this version; the gvisor engine is not part of this version; qemu cannot run here: no QEMU"}},
	} {
		got := auto(c.facts, c.engines, "")
		if got.remedy = ""; got != c.want {
			t.Errorf("%s:\n got %+v\nwant %+v", name, got, c.want)
		}
	}
}

// TestJSON pins the names that scripts read.
func TestJSON(t *testing.T) {
	r := Report{Engine: Choice{Auto: "qemu", Reason: "why"}, Checks: []Check{{"kvm", Warn, "slow", "buy"}}}
	b, err := json.Marshal(r)
	if err != nil {
		t.Fatal(err)
	}
	const want = `{"engine":{"auto":"qemu","reason":"why"},"checks":[{"name":"kvm","status":"warn","detail":"slow","remedy":"buy"}]}`
	if string(b) != want {
		t.Errorf("got  %s\nwant %s", b, want)
	}
}

// TestListJSON does the same for the list of engines.
func TestListJSON(t *testing.T) {
	in := goodHost()
	b, err := json.Marshal(Engines(in.Facts, in.Engines, "gvisor"))
	if err != nil {
		t.Fatal(err)
	}
	const want = `{"name":"qemu","available":true,"ready":true,"version":"QEMU 7.2","accelerator":"kvm","isolation":"vm-hardware","shares_memory":true,"reason":"","remedy":""}]}`
	if got := string(b); !strings.HasPrefix(got, `{"engine":{"auto":"qemu","reason":"`) || !strings.Contains(got, `"setting":"gvisor"},"engines":[`) || !strings.HasSuffix(got, want) {
		t.Errorf("got  %s\nwant %s", got, want)
	}
}

func TestText(t *testing.T) {
	var b strings.Builder
	r := Report{Engine: Choice{Reason: "nothing", Setting: "gvisor"}, Checks: []Check{{"kvm", Warn, "slow", "buy"}, {"disk", Pass, "big", ""}}}
	if err := r.WriteText(&b); err != nil {
		t.Fatal(err)
	}
	const want = `WARN  kvm   slow
            -> buy
PASS  disk  big

engine auto: none (nothing)
engine set:  gvisor
1 passed, 1 warnings, 0 failed, 0 skipped
`
	if b.String() != want {
		t.Errorf("got:\n%s\nwant:\n%s", b.String(), want)
	}
}

// TestThisHost gathers real facts and judges them.
func TestThisHost(t *testing.T) {
	dir := t.TempDir()
	in := goodHost()
	in.Facts, in.DataDir = Gather(t.Context(), dir+"/data"), dir+"/data"
	r := Run(t.Context(), in)
	checkInvariants(t, r)
	var b strings.Builder
	if err := r.WriteText(&b); err != nil {
		t.Fatal(err)
	}
	t.Log("\n" + b.String())
	if in.Facts.Disk.Path != dir {
		t.Errorf("space was read at %s, want %s", in.Facts.Disk.Path, dir)
	}
	if _, err := os.Stat("/dev/kvm"); err != nil && in.Facts.KVMErr == nil {
		t.Error("there is no /dev/kvm, but the probe found one")
	}
}
