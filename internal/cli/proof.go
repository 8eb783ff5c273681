package cli

import (
	"encoding/json"
	"fmt"
	"strconv"

	"forkd.dev/forkd/internal/errdefs"
	forkd "forkd.dev/forkd/sdk/go"
)

// proofCode prints what must differ between forks: values of generators whose
// state was captured in the parent, and the names a machine goes by.
const proofCode = `
import json, os, random, uuid
def _forkd_proof():
    def read(path):
        with open(path) as f:
            return f.read().strip()
    out = {
        "uuid.uuid4": str(uuid.uuid4()),
        "random.random": repr(random.random()),
        "os.urandom": os.urandom(16).hex(),
        "hostname": os.uname().nodename,
        "machine-id": read("/etc/machine-id"),
        "boot_id": read("/proc/sys/kernel/random/boot_id"),
    }
    try:
        import numpy
        out["numpy.random.rand"] = repr(float(numpy.random.rand()))
    except ImportError:
        pass
    return json.dumps(out)
print(_forkd_proof())
`

// proofNames are the values of proofCode in the order shown.
var proofNames = []string{"os.urandom", "uuid.uuid4", "random.random", "numpy.random.rand", "hostname", "machine-id", "boot_id"}

// demoProof tells whether one kind of value differs between all forks.
type demoProof struct {
	Name      string `json:"name"`
	Different int    `json:"different"`
	OK        bool   `json:"ok"`
	Example   string `json:"example"`
}

func proofValues(res forkd.EvalResult) (map[string]string, error) {
	if res.Error != nil {
		return nil, errdefs.New(errdefs.ErrGuest, "the code that shows uniqueness failed: %s", *res.Error)
	}
	var out map[string]string
	if err := json.Unmarshal(res.StdoutBytes(), &out); err != nil {
		return nil, errdefs.New(errdefs.ErrGuest, "the code that shows uniqueness printed %.200q: %w", res.Stdout, err)
	}
	return out, nil
}

// prove compares the values of all forks pairwise. A value that a fork lacks is a
// failure, except one that all lack (no numpy in the image).
func prove(forks []demoFork) []demoProof {
	var out []demoProof
	for _, name := range proofNames {
		seen, missing := map[string]bool{}, 0
		for _, f := range forks {
			v, ok := f.Values[name]
			if !ok || v == "" {
				missing++
				continue
			}
			seen[v] = true
		}
		if missing == len(forks) && name == "numpy.random.rand" {
			continue
		}
		out = append(out, demoProof{Name: name, Different: len(seen), OK: len(seen) == len(forks), Example: forks[0].Values[name]})
	}
	return out
}

func (a *app) printDemo(r demoReport) error {
	fmt.Fprintf(a.env.Stdout, "%d forks of %s on %s (%s)\n\n", r.N, r.Snapshot, r.Engine, r.Isolation)
	steps := [][]string{}
	for _, s := range r.Steps {
		steps = append(steps, []string{s.Name, millis(s.MS), s.Detail})
	}
	if err := a.table([]string{"STEP", "TIME", ""}, steps); err != nil {
		return err
	}
	fmt.Fprintln(a.env.Stdout)
	rows := [][]string{}
	for _, p := range r.Unique {
		verdict := "unique"
		if !p.OK {
			verdict = "NOT UNIQUE"
		}
		rows = append(rows, []string{p.Name, strconv.Itoa(p.Different) + "/" + strconv.Itoa(r.N), verdict, p.Example})
	}
	if err := a.table([]string{"VALUE", "DIFFERENT", "VERDICT", "EXAMPLE"}, rows); err != nil {
		return err
	}
	return a.printStory(r.Story)
}
