package qemu

import (
	"encoding/binary"
	"encoding/json"
	"errors"
	"flag"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"forkd.dev/forkd/internal/engine"
	"forkd.dev/forkd/internal/errdefs"
)

//nolint:gochecknoglobals // a flag of the test binary
var update = flag.Bool("update", false, "write the golden files")

// TestArgs compares whole command lines with golden files: what QEMU is started with
// is what confines it.
func TestArgs(t *testing.T) {
	file := func(name string) *os.File {
		f, err := os.Create(filepath.Join(t.TempDir(), name))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = f.Close() })
		return f
	}
	base := func() *process {
		return &process{
			name: "forkd-inst-sb00000000000000000000", shape: engine.Shape{CPUs: 2, MemoryMiB: 512, DiskMiB: 4096},
			memory: file("memory"), qmp: file("qmp"), agent: file("agent"), overlay: overlayFiles{rw: file("overlay"), ro: file("overlay")},
			disks:   []diskFile{{file("disk"), "raw"}},
			confine: confinement{root: true, uid: firstUID, dir: "/empty"},
		}
	}
	boot := base()
	boot.kernel, boot.initrd, boot.cmdline = "/k/vmlinux", "/k/initramfs", "quiet"
	fork := base()
	fork.incoming = true
	fork.disks = append(fork.disks, diskFile{file("one"), "qcow2"}, diskFile{file("two"), "qcow2"})
	user := base()
	user.incoming, user.confine = true, confinement{}
	for name, p := range map[string]*process{"boot": boot, "fork": fork, "fork-as-user": user} {
		t.Run(name, func(t *testing.T) {
			args, fds := p.args()
			got := strings.ReplaceAll(strings.Join(args, "\n"), "\n-", "\n\n-") + "\n\n"
			for i, f := range fds.files {
				got += "descriptor " + string(rune('0'+3+i)) + ": " + filepath.Base(f.Name()) + "\n"
			}
			golden(t, "args-"+name+".golden", got)
		})
	}
}

func golden(t *testing.T, name, got string) {
	t.Helper()
	path := filepath.Join("testdata", name)
	if *update {
		if err := os.WriteFile(path, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if string(want) != got {
		t.Errorf("%s differs; run with -update after a look. It is now:\n%s", path, got)
	}
}

func TestOverlay(t *testing.T) {
	for _, mib := range []int64{1, 511, 512, 513, 4096, 1 << 20} {
		path := filepath.Join(t.TempDir(), "disk.qcow2")
		if err := createOverlay(path, mib<<20); err != nil {
			t.Fatal(err)
		}
		b, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		checkOverlay(t, b, uint64(mib)<<20)
		if info, err := os.Stat(path); err != nil || info.Mode().Perm() != 0o600 {
			t.Errorf("mode of the overlay: %v, %v", info.Mode(), err)
		}
		if img, err := exec.LookPath("qemu-img"); err == nil {
			if out, err := exec.Command(img, "check", "-f", "qcow2", path).CombinedOutput(); err != nil {
				t.Errorf("qemu-img check of %d MiB: %v: %s", mib, err, out)
			}
		} else {
			t.Log("qemu-img is not installed: only the structure was checked")
		}
		if err := createOverlay(path, mib<<20); err == nil {
			t.Error("an existing overlay was overwritten")
		}
	}
	for _, size := range []int64{0, -1, 1 << 62} {
		path := filepath.Join(t.TempDir(), "disk.qcow2")
		if err := createOverlay(path, size); err == nil {
			t.Errorf("an overlay of %d bytes was created", size)
		}
	}
}

// checkOverlay follows the tables: every cluster of the file is referred to once, has
// refcount 1, and nothing is allocated.
func checkOverlay(t *testing.T, b []byte, size uint64) {
	t.Helper()
	be := binary.BigEndian
	if len(b) != 4*qcowCluster || be.Uint32(b) != qcowMagic || be.Uint32(b[4:]) != 3 || be.Uint64(b[24:]) != size {
		t.Fatalf("header of %d bytes: % x", len(b), b[:32])
	}
	if be.Uint64(b[8:]) != 0 || be.Uint32(b[16:]) != 0 {
		t.Error("the overlay names a backing file: a guest could make QEMU open it")
	}
	l1 := be.Uint64(b[40:])
	if entries := uint64(be.Uint32(b[36:])); entries*qcowBytesPerL1Entry < size {
		t.Errorf("%d L1 entries do not map %d bytes", entries, size)
	}
	table := be.Uint64(b[48:])
	block := be.Uint64(b[table:])
	for i, at := range []uint64{0, table, block, l1} {
		if at%qcowCluster != 0 || at >= uint64(len(b)) {
			t.Fatalf("structure %d lies at %#x", i, at)
		}
		if n := be.Uint16(b[block+2*(at/qcowCluster):]); n != 1 {
			t.Errorf("the cluster at %#x has refcount %d", at, n)
		}
	}
	if !isZero(b[l1:]) {
		t.Error("an empty overlay has allocated clusters")
	}
}

func TestRecord(t *testing.T) {
	dir := t.TempDir()
	if _, err := readRecord(dir); !errors.Is(err, errdefs.ErrNotFound) {
		t.Errorf("no record: error is %v", err)
	}
	rec := record{Version: recordVersion, ID: "sb00000000000000000000", PID: 7, Start: 1 << 60, BootID: "b", UID: firstUID,
		Shape: engine.Shape{CPUs: 1, MemoryMiB: 2, DiskMiB: 3}, MappedID: "sn00000000000000000000", Qualifier: "q",
		ForkedID: "sn00000000000000000001", Overlays: []string{"disk0.qcow2"}, Captures: []mark{{"sn00000000000000000002", 1}}}
	for range 2 { // writing again replaces
		if err := writeRecord(dir, rec); err != nil {
			t.Fatal(err)
		}
	}
	if got, err := readRecord(dir); err != nil || !reflect.DeepEqual(got, rec) {
		t.Errorf("wrote %+v, read %+v, %v", rec, got, err)
	}
	entries, err := os.ReadDir(dir)
	if err != nil || len(entries) != 1 {
		t.Errorf("the directory has %v, %v", entries, err)
	}
	rec.Version = recordVersion + 1
	if err := writeRecord(dir, rec); err != nil {
		t.Fatal(err)
	}
	if _, err := readRecord(dir); !errors.Is(err, errdefs.ErrIncompatible) {
		t.Errorf("newer record: error is %v", err)
	}
	for _, text := range []string{"", "{", "[]", `{"version":"1"}`, "\x00"} {
		if err := os.WriteFile(filepath.Join(dir, recordFile), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if _, err := readRecord(dir); !errors.Is(err, errdefs.ErrCorrupt) {
			t.Errorf("record %q: error is %v, want class corrupt", text, err)
		}
	}
}

// FuzzRecord: whatever stands in a machine's record, reading it gives a record of our
// version or an error with a class.
func FuzzRecord(f *testing.F) {
	good, err := json.Marshal(record{Version: recordVersion, ID: "sb00000000000000000000", PID: 1})
	if err != nil {
		f.Fatal(err)
	}
	f.Add(good)
	f.Add([]byte(`{"version":1,"pid":-1}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		dir := t.TempDir()
		if err := os.WriteFile(filepath.Join(dir, recordFile), b, 0o600); err != nil {
			t.Fatal(err)
		}
		rec, err := readRecord(dir)
		if err == nil && rec.Version != recordVersion {
			t.Errorf("read version %d", rec.Version)
		}
		if err != nil && errdefs.Class(err) == errdefs.ErrInternal {
			t.Errorf("error without class: %v", err)
		}
	})
}

func TestNameArg(t *testing.T) {
	for _, c := range []struct {
		args []string
		want string
	}{
		{nil, ""},
		{[]string{"/usr/bin/qemu-system-x86_64"}, ""},
		{[]string{"/usr/bin/qemu-system-x86_64", "-name", "forkd-a-b"}, "forkd-a-b"},
		{[]string{"/usr/bin/qemu-system-x86_64", "-x", "-name"}, ""},
		{[]string{"/bin/sh", "-name", "forkd-a-b"}, ""},
	} {
		if got := nameArg(c.args); got != c.want {
			t.Errorf("name of %q is %q, want %q", c.args, got, c.want)
		}
	}
}

func TestKernelCmdline(t *testing.T) {
	line := kernelCmdline(2_100_000)
	for _, want := range []string{"tsc_early_khz=2100000", "forkd.root=/dev/vda", "panic=-1"} {
		if !strings.Contains(line, want) {
			t.Errorf("no %q in %q", want, line)
		}
	}
}
