package linux

import (
	"path/filepath"
	"testing"
)

func TestHostFacts(t *testing.T) {
	if r, err := KernelRelease(); err != nil || r == "" {
		t.Errorf("kernel release %q, %v", r, err)
	}
	dir := t.TempDir()
	d, err := ReadDisk(filepath.Join(dir, "not", "there", "yet"))
	if err != nil || d.Path != dir || d.TotalBytes < d.AvailableBytes || d.AvailableBytes <= 0 {
		t.Errorf("disk %+v, %v", d, err)
	}
	if n, err := FileLimit(); err != nil || n < 64 {
		t.Errorf("file limit %d, %v", n, err)
	}
	if n, err := ProcessLimit(); err != nil || n == 0 {
		t.Errorf("process limit %d, %v", n, err)
	}
	if c, err := ReadCPU(); err != nil || !c.Flags["fpu"] {
		t.Errorf("processor %+v, %v", c, err)
	}
	// These two are on every kernel since 5.3; the others are reported only.
	f := ProbeFeatures()
	if f.MemfdSeals != nil || f.Pidfd != nil {
		t.Errorf("required features: %v, %v", f.MemfdSeals, f.Pidfd)
	}
	t.Logf("optional: PAGEMAP_SCAN: %v, userfaultfd: %v", f.PagemapScan, f.Userfaultfd)
}

func TestParseCPU(t *testing.T) {
	c := parseCPU("processor\t: 0\nmodel name\t: Some CPU\nflags\t\t: fpu svm\n\nprocessor\t: 1\nflags\t\t: vmx\n")
	if c.Model != "Some CPU" || c.Virtualization() != "svm" {
		t.Errorf("%+v", c)
	}
	if v := parseCPU("").Virtualization(); v != "" {
		t.Errorf("no processor has %s", v)
	}
}
