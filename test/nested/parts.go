package main

import (
	"regexp"
	"time"
)

// part is one program that runs in L1.
type part struct {
	name    string
	pkg     string   // of the test, relative to the module
	run     string   // -test.run
	argv    []string // of a program of ours that is no test
	image   bool     // needs the guest image
	timeout time.Duration
}

// suite is all parts in the order in which they run.
func suite() []part {
	return []part{
		{name: "linux", pkg: "internal/linux", run: "KVM|TSC|Pagemap|Private", timeout: 2 * time.Minute},
		{name: "conformance", pkg: "internal/engine/kvm", run: "TestConformance", image: true, timeout: 9 * time.Minute},
		{name: "machines", pkg: "internal/engine/kvm", run: "TestMachines", image: true, timeout: 6 * time.Minute},
		{name: "demo", argv: []string{"/bin/forkd", "demo", "-n", "5", "--engine", "kvm"}, image: true, timeout: 5 * time.Minute},
	}
}

func chosen(only *regexp.Regexp) []part {
	var out []part
	for _, p := range suite() {
		if only.MatchString(p.name) {
			out = append(out, p)
		}
	}
	return out
}
