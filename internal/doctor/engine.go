package doctor

import (
	"fmt"
	"strings"

	"forkd.dev/forkd/internal/engine"
	"forkd.dev/forkd/internal/engine/selection"
)

// Engine is what one driver said about this host.
type Engine struct {
	Name  string
	Ready bool // auto may choose it
	Probe engine.Probe
}

// EngineInfo is an engine as reports show it.
type EngineInfo struct {
	Name         string           `json:"name"`
	Available    bool             `json:"available"`
	Ready        bool             `json:"ready"` // auto may choose it
	Version      string           `json:"version"`
	Accelerator  string           `json:"accelerator"`
	Isolation    engine.Isolation `json:"isolation"`
	SharesMemory bool             `json:"shares_memory"`
	Reason       string           `json:"reason"` // why not, or what it will use
	Remedy       string           `json:"remedy"` // what to do if not available
}

// Info returns e as reports show it.
func (e Engine) Info() EngineInfo {
	p := e.Probe
	return EngineInfo{
		Name: e.Name, Available: p.Available, Ready: e.Ready, Version: p.Version, Accelerator: p.Accelerator,
		Isolation: p.Isolation, SharesMemory: p.SharesMemory, Reason: p.Reason, Remedy: p.Remedy,
	}
}

// EngineList is what `forkd engine ls` shows.
type EngineList struct {
	Engine  Choice       `json:"engine"`
	Engines []EngineInfo `json:"engines"`
}

// Engines lists engines with the one that auto means.
func Engines(f Facts, all []Engine, setting string) EngineList {
	out := EngineList{Engine: auto(f, all, setting), Engines: []EngineInfo{}}
	for _, e := range all {
		out.Engines = append(out.Engines, e.Info())
	}
	return out
}

// auto is the choice among engines that were probed.
func auto(f Facts, all []Engine, setting string) Choice {
	var candidates []selection.Candidate
	for _, e := range all {
		candidates = append(candidates, selection.Candidate{Name: e.Name, Ready: e.Ready, Probe: func() engine.Probe { return e.Probe }})
	}
	c := selection.Choose(f.speed(), candidates)
	if setting == selection.Auto {
		setting = ""
	}
	return Choice{Auto: c.Engine, Reason: c.Reason, Setting: setting, remedy: c.Remedy}
}

func (f Facts) speed() selection.Speed { return selection.Speed{KVM: f.KVM, Err: f.KVMErr} }

// used is the engine that a daemon of this host runs: the one that is set, else auto's.
func (c Choice) used() string {
	if c.Setting != "" {
		return c.Setting
	}
	return c.Auto
}

func find(engines []Engine, name string) (Engine, bool) {
	for _, e := range engines {
		if e.Name == name {
			return e, true
		}
	}
	return Engine{}, false
}

// engineCheck judges the engine that will be used.
func engineCheck(in Input, c Choice) Check {
	const name = "engine"
	e, ok := find(in.Engines, c.used())
	switch {
	case c.used() == "":
		return notPass(name, Fail, "no engine works here: "+c.Reason, orElse(c.remedy, "make setup"))
	case !ok:
		return notPass(name, Fail, fmt.Sprintf("engine %.40q is set, and there is none of that name", c.Setting), "set auto or one of those that forkd engine ls shows")
	case !e.Probe.Available:
		return notPass(name, Fail, fmt.Sprintf("engine %s is set and cannot run here: %s", e.Name, e.Probe.Reason), orElse(e.Probe.Remedy, "set auto"))
	}
	how := "auto = " + e.Name
	if c.Setting != "" {
		how = fmt.Sprintf("%s is set (auto = %s)", e.Name, orElse(c.Auto, "none"))
	}
	memory := "forks share memory copy-on-write"
	if !e.Probe.SharesMemory {
		memory = "each fork is a full copy of the memory"
	}
	return pass(name, "%s (%s, %s), isolation %s; %s", how, orElse(e.Probe.Version, e.Name), e.Probe.Accelerator, e.Probe.Isolation, memory)
}

// engineChecks lists the engines.
func engineChecks(in Input) []Check {
	var out []Check
	for _, e := range in.Engines {
		name := "engine-" + e.Name
		if e.Probe.Available {
			out = append(out, pass(name, "works here: %s, %s, isolation %s", orElse(e.Probe.Version, e.Name), e.Probe.Accelerator, e.Probe.Isolation))
		} else {
			out = append(out, notPass(name, Skip, e.Probe.Reason, orElse(e.Probe.Remedy, "go on with another engine")))
		}
	}
	return out
}

func orElse(s, otherwise string) string {
	if s == "" {
		return otherwise
	}
	return s
}

// boundaries says in words what each kind of isolation is.
func boundary(i engine.Isolation) string {
	switch i {
	case engine.IsolationHardware:
		return ": the processor's own virtualization"
	case engine.IsolationEmulated:
		return ": QEMU's own policy calls emulation no security boundary, so the confinement is it"
	case engine.IsolationUserKernel:
		return ": a kernel in user space answers all system calls; less than a hardware VM, more than a container"
	}
	return ""
}

func isolation(in Input, c Choice) Check {
	const name = "isolation"
	e, ok := find(in.Engines, c.used())
	if !ok || !e.Probe.Available {
		return notPass(name, Skip, "no engine, no isolation", "see the check engine")
	}
	detail := string(e.Probe.Isolation) + boundary(e.Probe.Isolation)
	if len(e.Probe.Confinement) > 0 {
		detail += "; each machine process has: " + strings.Join(e.Probe.Confinement, ", ")
	}
	switch {
	case len(e.Probe.Lost) > 0:
		return notPass(name, Warn, detail+"; lost: "+strings.Join(e.Probe.Lost, ", "), "run the daemon as root")
	case e.Probe.Isolation == engine.IsolationEmulated:
		return notPass(name, Warn, detail, "for hostile code put this host itself into a virtual machine, or use one with hardware virtualization")
	}
	return pass(name, "%s", detail)
}
