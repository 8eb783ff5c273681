package rest

import (
	"errors"
	"testing"

	api "forkd.dev/forkd/api/rest"
	"forkd.dev/forkd/internal/errdefs"
)

// FuzzBodies feeds any bytes to every decoder of a request: each gives a request
// within its limits or an error of a class that is the caller's fault.
func FuzzBodies(f *testing.F) {
	for _, seed := range []string{
		`{}`, `null`, `[]`, `{"snapshot_tag":"py-base","n":5,"env":{"A":"b"}}`, `{"args":["ls"],"timeout_secs":1e9}`,
		`{"args":["ls"],"stdin_base64":"AA=="}`, `{"tag":"x","image":"y","exec_timeout_secs":-1}`, `{"n":1e400}`, "\xff", `{"args":[null]}`,
	} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, raw []byte) {
		check := func(err error) {
			if err != nil && !errors.Is(err, errdefs.ErrInvalid) && !errors.Is(err, errdefs.ErrUnsupported) {
				t.Errorf("%q: error of class %v: %v", raw, errdefs.Class(err), err)
			}
		}
		var create api.CreateSandboxes
		if err := unmarshal(raw, &create); err != nil {
			check(err)
			return
		}
		if fork, err := forkOf(create); err != nil {
			check(err)
		} else if fork.N < 1 || fork.N > 1000 || fork.MemoryLimitMiB < 0 {
			t.Errorf("%q: accepted as %+v", raw, fork)
		}
		var run api.Exec
		if err := unmarshal(raw, &run); err != nil {
			check(err)
		} else if call, err := execOf(run); err != nil {
			check(err)
		} else if len(call.Argv) == 0 || call.Timeout <= 0 {
			t.Errorf("%q: accepted as %+v", raw, call)
		}
		var sn api.CreateSnapshot
		if err := unmarshal(raw, &sn); err != nil {
			check(err)
		} else if c, err := createOf(sn); err != nil {
			check(err)
		} else if c.Tag == "" || c.ExecTimeout < 0 {
			t.Errorf("%q: accepted as %+v", raw, c)
		}
	})
}
