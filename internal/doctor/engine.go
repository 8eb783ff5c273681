package doctor

import (
	"fmt"
	"strings"

	"forkd.dev/forkd/internal/engine"
)

// Engine is what one driver said about this host.
type Engine struct {
	Name  string
	Probe engine.Probe
}

// preference is the order in which auto tries engines. kvm counts only where the
// processor itself runs kernel code: emulated, it is slower than qemu.
func preference() []string { return []string{"kvm", "gvisor", "qemu"} }

// Auto picks the engine for a host with these facts. The reason tells, for each
// engine before the chosen one, why not.
func Auto(f Facts, engines []Engine) Choice {
	var why []string
	for _, name := range preference() {
		e, built := find(engines, name)
		switch {
		case !built:
			why = append(why, "the "+name+" engine is not part of this version")
		case !e.Probe.Available:
			why = append(why, name+" cannot run here: "+e.Probe.Reason)
		case name == "kvm" && !f.kvmFast():
			why = append(why, "kvm is not worth it here")
		default:
			return Choice{Auto: name, Reason: chosen(f, e, why)}
		}
	}
	return Choice{Reason: strings.Join(append([]string{kvmSentence(f)}, why...), "; ")}
}

func (f Facts) kvmFast() bool { return f.KVMErr == nil && f.KVM.Fast() }

func chosen(f Facts, e Engine, why []string) string {
	parts := append([]string{kvmSentence(f)}, why...)
	with := e.Name
	if e.Probe.Accelerator != "" {
		with += " with " + strings.ToUpper(e.Probe.Accelerator)
	}
	return strings.Join(append(parts, "so "+with), "; ")
}

// kvmSentence says in plain words what /dev/kvm is worth.
func kvmSentence(f Facts) string {
	switch {
	case f.KVMErr != nil:
		return fmt.Sprintf("no usable /dev/kvm (%v)", f.KVMErr)
	case f.KVM.Fast():
		return fmt.Sprintf("/dev/kvm runs kernel code at full speed (%.0f million instructions/s)", f.KVM.MIPS())
	}
	return fmt.Sprintf("/dev/kvm runs kernel code at %.1f million instructions/s: emulated", f.KVM.MIPS())
}

func find(engines []Engine, name string) (Engine, bool) {
	for _, e := range engines {
		if e.Name == name {
			return e, true
		}
	}
	return Engine{}, false
}
