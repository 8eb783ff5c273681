package machine

import (
	"bytes"
	"testing"

	"forkd.dev/forkd/internal/tinyguest"
	"forkd.dev/forkd/internal/vmm/arch"
)

// TestManyCPUs: processors that still wait for their start-up message are paused, captured and
// restored with the one that runs.
func TestManyCPUs(t *testing.T) {
	s := openKVM(t)
	m, u := blank(t, s, MaxCPUs)
	elf := tinyguest.ELF()
	kernel := arch.File{ReaderAt: bytes.NewReader(elf), Bytes: int64(len(elf))}
	if err := m.Boot(arch.Boot{Kernel: kernel, Cmdline: "touch=1 wait=1"}); err != nil {
		t.Fatal(err)
	}
	if err := m.Resume(); err != nil {
		t.Fatal(err)
	}
	u.expect(t, m, tinyguest.Ready)
	for range 20 {
		m.Pause()
		if err := m.Resume(); err != nil {
			t.Fatal(err)
		}
	}
	from := take(t, m, nil, false)
	child, out := blank(t, s, MaxCPUs)
	if err := child.Restore(from.plan, from.state, [16]byte{1}); err != nil {
		t.Fatal(err)
	}
	if err := child.Resume(); err != nil {
		t.Fatal(err)
	}
	out.expect(t, child, tinyguest.Resumed)
	other, _ := blank(t, s, 1)
	if err := other.Restore(from.plan, from.state, [16]byte{1}); err == nil {
		t.Error("a state of eight processors is restored into a machine with one")
	}
}
