package vmmwire

import "testing"

func TestProcess(t *testing.T) {
	want := Process{Name: "forkd-x-sb1", Shape: Shape{CPUs: 2, MemoryMiB: 512}, UID: 1000000000, MaxFiles: 100, MaxFileMiB: 2048}
	got, err := ParseProcess(want.Args())
	if err != nil || got != want {
		t.Errorf("%+v became %+v, %v", want, got, err)
	}
	if name := NameOf(append([]string{"/a/b/forkd-vmm-1234"}, want.Args()...)); name != want.Name {
		t.Errorf("name is %q", name)
	}
	for _, args := range [][]string{nil, {"/bin/sh", "-name", "forkd-vmm"}, {"forkd-vmm", "-x", "y"}, {"forkd-vmm"}} {
		if name := NameOf(args); name != "" {
			t.Errorf("%q has name %q", args, name)
		}
	}
	for i := range want.Args() {
		args := want.Args()
		if _, err := ParseProcess(args[:i]); err == nil && i != 8 && i != 10 {
			t.Errorf("%q is complete", args[:i])
		}
		if args[i] = "!"; i != 1 {
			if _, err := ParseProcess(args); err == nil {
				t.Errorf("%q is understood", args)
			}
		}
	}
}
