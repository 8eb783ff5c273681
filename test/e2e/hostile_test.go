package e2e

import (
	"context"
	"errors"
	"strconv"
	"strings"
	"testing"
	"time"

	forkd "forkd.dev/forkd/sdk/go"
)

// takePort is Python that takes the agent's end of the channel out of process 1, as
// root of a guest can, and puts a descriptor of it into port.
const takePort = `
import ctypes, os
call = ctypes.CDLL(None, use_errno=True).syscall
agent, port = call(434, 1, 0), -1 # pidfd_open
for n in os.listdir('/proc/1/fd'):
    try:
        if 'vport' in os.readlink('/proc/1/fd/' + n):
            port = call(438, agent, int(n), 0) # pidfd_getfd
    except OSError:
        pass
if port < 0:
    raise SystemExit('no port: %s' % [os.readlink('/proc/1/fd/' + n) for n in os.listdir('/proc/1/fd')])
os.set_blocking(port, True)
if os.fork():
    os._exit(0)
os.setsid()
null = os.open('/dev/null', os.O_RDWR)
for n in range(3):
    os.dup2(null, n)
`

// attack is what a hostile guest does to its host.
type attack struct {
	name, python string
	// talks: calls of the sandbox still work. If not, they fail for a stated reason.
	talks bool
}

var attacks = []attack{
	{name: "noise on the agent's port", python: takePort + `
noise = os.urandom(1 << 20)
while True:
    os.write(port, noise[:65536 + noise[0]])
`},
	{name: "garbage for HELLO", python: takePort + `
while True: # takes what the host says, and answers with a frame of 4 GiB
    os.write(port, b'\0\xff\xff\xff\xff\xff\xff\xff\xff\0' + b'\x01' * 300)
    os.read(port, 1 << 16)
`},
	{name: "the port without a NUL", python: takePort + `
while True:
    os.write(port, b'\x01' * 65536)
`},
	{name: "fork bomb", python: `
import os
if os.fork():
    os._exit(0)
os.setsid()
null = os.open('/dev/null', os.O_RDWR)
for n in range(3):
    os.dup2(null, n)
while True:
    try:
        os.fork()
    except OSError:
        pass
`},
	{name: "full disk", talks: true, python: `
import os
st = os.statvfs('/root')
with open('/root/full', 'wb') as f:
    os.posix_fallocate(f.fileno(), 0, st.f_bavail * st.f_frsize - (1 << 20))
try:
    with open('/root/more', 'wb') as f:
        while True:
            f.write(bytes(1 << 16)); f.flush()
except OSError as e:
    print(e)
`},
	{name: "output without end", talks: true, python: `
import os, sys
if os.fork():
    os._exit(0)
for _ in range(2000):
    os.write(1, bytes(1 << 16))
`},
}

// TestHostileGuests: whatever a guest does, its neighbour answers, the daemon stays
// as it is, and the sandbox itself can be ended and says what is wrong with it.
func TestHostileGuests(t *testing.T) {
	w := running(t)
	list := w.fork(t, "py-base", len(attacks)+1)
	neighbour := list[len(attacks)]
	before := w.daemonKiB(t)
	for i, a := range attacks {
		t.Run(a.name, func(t *testing.T) {
			id := list[i].ID
			res, err := w.client.Exec(t.Context(), id, forkd.ExecRequest{
				Args: []string{"python3", "-c", a.python}, TimeoutSecs: forkd.Seconds(20),
			})
			t.Logf("it did: exit code %d, %.60q, %.300q, %v", res.ExitCode, res.Stdout, res.Stderr, err)
			if err == nil && res.ExitCode != 0 {
				t.Errorf("the attack did not begin: %+v", res)
			}
			w.checkNeighbour(t, neighbour.ID)
			w.checkAttacker(t, id, a.talks)
			w.checkNeighbour(t, neighbour.ID)
			if err := w.client.Kill(t.Context(), id); err != nil {
				t.Errorf("end it: %v", err)
			}
		})
	}
	if grown := w.daemonKiB(t) - before; grown > 64<<10 {
		t.Errorf("the daemon grew by %d KiB", grown)
	}
	w.checkConsistent(t, neighbour.ID)
}

// checkAttacker: the sandbox answers, or its call ends for a reason that is the
// guest's or the caller's own limit of time.
func (w *world) checkAttacker(t *testing.T, id string, talks bool) {
	t.Helper()
	if talks {
		w.answers(t, id)
		return
	}
	const patience = 10 * time.Second
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	began := time.Now()
	_, err := w.client.Eval(ctx, id, forkd.EvalRequest{Code: "1", TimeoutSecs: forkd.Seconds(3)})
	t.Logf("eval after %v: %v", time.Since(began), err)
	if err != nil && !errors.Is(err, forkd.ErrGuest) && !errors.Is(err, forkd.ErrUnavailable) && !errors.Is(err, forkd.ErrTimeout) && ctx.Err() == nil {
		t.Errorf("eval: %v", err)
	}
}

// checkNeighbour: another sandbox answers as if nothing were.
func (w *world) checkNeighbour(t *testing.T, id string) {
	t.Helper()
	const patience = 5 * time.Second
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	res, err := w.client.Eval(ctx, id, forkd.EvalRequest{Code: "6*7"})
	if err != nil || text(res.Result) != "42" {
		t.Errorf("the neighbour: %s, %s, %v", text(res.Result), text(res.Error), err)
	}
}

// daemonKiB is how much memory the daemon has of its own.
func (w *world) daemonKiB(t *testing.T) int {
	t.Helper()
	field := status(t, w.daemon.Process.Pid)["RssAnon"]
	kib, err := strconv.Atoi(strings.TrimSuffix(field, " kB"))
	if err != nil {
		t.Fatalf("memory of the daemon: %q: %v", field, err)
	}
	return kib
}
