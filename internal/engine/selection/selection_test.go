package selection

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"forkd.dev/forkd/internal/engine"
	"forkd.dev/forkd/internal/linux"
)

// state is how an engine may be on a host.
type state int

const (
	missing  state = iota // not in this build
	unready               // works, but is not chosen by itself
	unusable              // does not work here
	usable
)

// TestChoose goes through every combination of engines and of what /dev/kvm is.
func TestChoose(t *testing.T) {
	speeds := map[string]Speed{
		"none":    {Err: errors.New("no /dev/kvm")},
		"slow":    {KVM: linux.KVMSpeed{Instructions: 140_000, Took: 100 * time.Millisecond}},
		"unknown": {Unknown: true},
		"fast":    {KVM: linux.KVMSpeed{Instructions: 600_000_000, Took: 100 * time.Millisecond}},
	}
	for kind, speed := range speeds {
		for kvm := missing; kvm <= usable; kvm++ {
			for gvisor := missing; gvisor <= usable; gvisor++ {
				for qemu := missing; qemu <= usable; qemu++ {
					states := map[string]state{KVM: kvm, GVisor: gvisor, QEMU: qemu}
					t.Run(fmt.Sprint(kind, states), func(t *testing.T) { checkChoice(t, speed, states) })
				}
			}
		}
	}
}

func checkChoice(t *testing.T, speed Speed, states map[string]state) {
	probed := map[string]int{}
	var candidates []Candidate
	for name, s := range states {
		if s == missing {
			continue
		}
		candidates = append(candidates, Candidate{Name: name, Ready: s != unready, Probe: func() engine.Probe {
			probed[name]++
			if s == usable {
				return engine.Probe{Available: true, Accelerator: "acc-" + name}
			}
			return engine.Probe{Reason: name + " is broken", Remedy: "mend " + name}
		}})
	}
	want, remedy := "", ""
	for _, name := range Names() {
		tried := states[name] >= unusable && (name != KVM || speed.Fast())
		if tried && want == "" && states[name] == usable {
			want = name
		} else if tried && want == "" && remedy == "" {
			remedy = "mend " + name
		}
	}
	got := Choose(speed, candidates)
	if got.Engine != want || got.Remedy != remedy {
		t.Errorf("chose %q with remedy %q, want %q with %q", got.Engine, got.Remedy, want, remedy)
	}
	if speed.Unknown == strings.Contains(got.Reason, "/dev/kvm") || strings.Contains(got.Reason, "\n") {
		t.Errorf("reason %q", got.Reason)
	}
	if want != "" && !strings.HasSuffix(got.Reason, "so "+want+" with ACC-"+strings.ToUpper(want)) {
		t.Errorf("reason %q does not end with the choice", got.Reason)
	}
	for _, name := range Names() {
		if states[name] == unusable && strings.Contains(got.Reason, name+" is broken") != (probed[name] == 1) {
			t.Errorf("probed %s %d times, reason %q", name, probed[name], got.Reason)
		}
		if probed[name] > 1 || probed[name] == 1 && (states[name] == unready || name == KVM && !speed.Fast()) {
			t.Errorf("probed %s %d times in vain", name, probed[name])
		}
		if name == want {
			break
		}
		if states[name] == unready && !strings.Contains(got.Reason, name+" engine is not ready") {
			t.Errorf("reason %q is silent about %s", got.Reason, name)
		}
	}
}
