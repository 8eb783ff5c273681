package cgroup

import (
	"reflect"
	"testing"
)

func TestParseLayout(t *testing.T) {
	const (
		hybridMounts = `30 24 0:25 / /sys/fs/cgroup rw,nosuid - tmpfs tmpfs ro,mode=755
31 30 0:26 / /sys/fs/cgroup/unified rw,relatime shared:8 - cgroup2 cgroup2 rw
32 30 0:27 / /sys/fs/cgroup/cpu,cpuacct rw,relatime shared:9 - cgroup cgroup rw,cpu,cpuacct
33 30 0:28 / /sys/fs/cgroup/memory rw,relatime shared:10 - cgroup cgroup rw,memory
34 30 0:29 / /sys/fs/cgroup/systemd rw,relatime - cgroup cgroup rw,xattr,name=systemd
35 30 0:28 / /mnt/again\040here rw,relatime - cgroup cgroup rw,memory
`
		hybridOwn = `4:memory:/a/b
3:cpu,cpuacct:/
2:name=systemd:/x
0::/x
`
		v2Mounts = "30 24 0:25 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n"
		// A container without a cgroup namespace sees its own part of the tree.
		dockerMounts = "30 24 0:28 /docker/abc /sys/fs/cgroup/memory ro,nosuid - cgroup cgroup rw,memory\n"
	)
	for name, c := range map[string]struct {
		mounts, own string
		want        []Hierarchy
	}{
		"hybrid": {hybridMounts, hybridOwn, []Hierarchy{
			{Version: 2, Mount: "/sys/fs/cgroup/unified", Own: "/x"},
			{Version: 1, Mount: "/sys/fs/cgroup/cpu,cpuacct", Own: "/", Controllers: []string{"cpu", "cpuacct"}},
			{Version: 1, Mount: "/sys/fs/cgroup/memory", Own: "/a/b", Controllers: []string{"memory"}},
			{Version: 1, Mount: "/sys/fs/cgroup/systemd", Own: "/x", Controllers: []string{"name=systemd"}},
		}},
		"v2": {v2Mounts, "0::/system.slice/forkd.service\n", []Hierarchy{
			{Version: 2, Mount: "/sys/fs/cgroup", Own: "/system.slice/forkd.service"},
		}},
		"docker": {dockerMounts, "4:memory:/docker/abc\n", []Hierarchy{
			{Version: 1, Mount: "/sys/fs/cgroup/memory", Own: "/", Controllers: []string{"memory"}},
		}},
		"docker, similar name": {dockerMounts, "4:memory:/docker/abcd\n", nil},
		"outside of namespace": {v2Mounts, "0::/../other\n", nil},
		"garbage":              {"x\n - cgroup\n1 2 3 4 5 - cgroup x\n", "::\nx\n", nil},
	} {
		if got := parseLayout([]byte(c.mounts), []byte(c.own)); !reflect.DeepEqual(got, c.want) {
			t.Errorf("%s: got %+v\nwant %+v", name, got, c.want)
		}
	}
}

func TestModeOf(t *testing.T) {
	v1, v2 := Hierarchy{Version: 1}, Hierarchy{Version: 2}
	for want, hs := range map[Mode][]Hierarchy{
		ModeNone: nil, ModeV1: {v1, v1}, ModeV2: {v2}, ModeHybrid: {v2, v1},
	} {
		if got := modeOf(hs); got != want {
			t.Errorf("modeOf(%v) = %s, want %s", hs, got, want)
		}
	}
}

func FuzzParseLayout(f *testing.F) {
	f.Add([]byte("31 30 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n"), []byte("0::/\n"))
	f.Add([]byte("33 30 0:28 /a /m rw - cgroup cgroup rw,memory\n"), []byte("4:memory:/a/b\n"))
	f.Fuzz(func(t *testing.T, mounts, own []byte) {
		for _, h := range parseLayout(mounts, own) {
			if len(h.Own) == 0 || h.Own[0] != '/' {
				t.Errorf("own group %q is not absolute", h.Own)
			}
		}
	})
}
