// Package selection decides which engine "auto" means on a host.
//
// The order is kvm where the processor itself runs kernel code, gvisor where runsc
// works, qemu. The mere presence of /dev/kvm decides nothing: some hosts emulate the
// kernel code of its guests, slower than an emulator does.
package selection

import (
	"fmt"
	"strings"

	"forkd.dev/forkd/internal/engine"
	"forkd.dev/forkd/internal/linux"
)

// Names of the engines, in the order in which auto tries them.
const (
	KVM    = "kvm"
	GVisor = "gvisor"
	QEMU   = "qemu"
)

// Auto as the name of an engine leaves the choice to [Choose].
const Auto = "auto"

// Names lists the engines in the order in which auto tries them.
func Names() []string { return []string{KVM, GVisor, QEMU} }

// Candidate is an engine that auto may choose.
type Candidate struct {
	Name string
	// Ready: this version's suites passed on it. One that is not has to be asked for.
	Ready bool
	// Probe looks at the host; it is called only if the answer matters.
	Probe func() engine.Probe
}

// Speed is what /dev/kvm is worth.
type Speed struct {
	KVM     linux.KVMSpeed
	Err     error // why it is worth nothing
	Unknown bool  // nobody measured, because it would change nothing
}

// Fast tells whether the processor itself runs kernel code of guests.
func (s Speed) Fast() bool { return !s.Unknown && s.Err == nil && s.KVM.Fast() }

// String says it in plain words.
func (s Speed) String() string {
	switch {
	case s.Err != nil:
		return fmt.Sprintf("no usable /dev/kvm (%v)", s.Err)
	case s.KVM.Fast():
		return fmt.Sprintf("/dev/kvm runs kernel code at full speed (%.0f million instructions/s)", s.KVM.MIPS())
	}
	return fmt.Sprintf("/dev/kvm runs kernel code at %.1f million instructions/s: emulated", s.KVM.MIPS())
}

// Choice is what auto means. Engine is "" if none works here.
type Choice struct {
	Engine string
	Reason string // one sentence; of each engine before the chosen one it says why not
	Remedy string // how to get the best of those that do not work, or ""
}

// Choose picks the engine for a host.
func Choose(speed Speed, candidates []Candidate) Choice {
	var why []string
	if !speed.Unknown {
		why = append(why, speed.String())
	}
	remedy := ""
	for _, name := range Names() {
		c, ok := find(candidates, name)
		switch {
		case !ok:
			why = append(why, "the "+name+" engine is not part of this version")
			continue
		case !c.Ready:
			why = append(why, "the "+name+" engine is not ready in this version")
			continue
		case name == KVM && !speed.Fast():
			why = append(why, "kvm is not worth it here")
			continue
		}
		p := c.Probe()
		if p.Available {
			return Choice{Engine: name, Reason: strings.Join(append(why, "so "+with(name, p)), "; "), Remedy: remedy}
		}
		why = append(why, name+" cannot run here: "+p.Reason)
		if remedy == "" {
			remedy = p.Remedy
		}
	}
	return Choice{Reason: strings.Join(why, "; "), Remedy: remedy}
}

func with(name string, p engine.Probe) string {
	if p.Accelerator == "" || p.Accelerator == name {
		return name
	}
	return name + " with " + strings.ToUpper(p.Accelerator)
}

func find(all []Candidate, name string) (Candidate, bool) {
	for _, c := range all {
		if c.Name == name {
			return c, true
		}
	}
	return Candidate{}, false
}
