package guest

import (
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"forkd.dev/forkd/internal/agentwire"
	"forkd.dev/forkd/internal/errdefs"
)

// cgroupDir makes a cgroup2 directory for one agent.
func cgroupDir(t *testing.T) string {
	t.Helper()
	for _, base := range []string{"/sys/fs/cgroup/unified", "/sys/fs/cgroup"} {
		if _, err := os.Stat(filepath.Join(base, "cgroup.procs")); err != nil {
			continue
		}
		dir := filepath.Join(base, "forkd-test-"+strconv.Itoa(os.Getpid())+"-"+strings.ToLower(t.Name()))
		if err := os.Mkdir(dir, 0o755); err != nil {
			break
		}
		t.Cleanup(func() {
			if err := os.Remove(dir); err != nil {
				t.Errorf("leftover: %v", err)
			}
		})
		return dir
	}
	t.Skip("no cgroup2 hierarchy that this user may write")
	return ""
}

func newIdentity(n uint64) agentwire.Identity {
	digit := strconv.FormatUint(n%10, 10)
	return agentwire.Identity{
		SandboxID: "sb" + strings.Repeat(digit, 20), Hostname: "fork-" + digit,
		MachineID: strings.Repeat(digit, 32),
		BootID:    "00000000-0000-4000-8000-00000000000" + digit,
		Token:     "token-" + digit, Entropy: []byte(strings.Repeat(digit, 64)),
		Env: map[string]string{"SHARD": digit}, Secrets: map[string]string{"KEY": "secret-" + digit},
		Generation: n,
	}
}

func stepNames(r agentwire.Receipt) (names []string) {
	for _, s := range r.Steps {
		names = append(names, s.Name)
	}
	return names
}

func step(t *testing.T, r agentwire.Receipt, name string) agentwire.ReceiptStep {
	t.Helper()
	for _, s := range r.Steps {
		if s.Name == name {
			return s
		}
	}
	t.Fatalf("no step %s in %+v", name, r.Steps)
	return agentwire.ReceiptStep{}
}

func isFrozen(t *testing.T, dir string) bool {
	t.Helper()
	b, err := os.ReadFile(filepath.Join(dir, "cgroup.events"))
	if err != nil {
		t.Fatal(err)
	}
	return strings.Contains(string(b), "frozen 1")
}

// startLoop starts a program that runs until the agent ends.
func startLoop(t *testing.T, c *Client) {
	t.Helper()
	marker := t.TempDir() + "/up"
	go c.Exec(t.Context(), agentwire.ExecRequest{Argv: []string{"sh", "-c", "echo > " + marker + "; while :; do sleep 0.01; done"}, Timeout: time.Hour})
	awaitFile(t, marker)
}

func TestPrepareFreezesAndSourceThaws(t *testing.T) {
	dir := cgroupDir(t)
	c := newClient(t, "-cgroup", dir)
	wantClass(t, c.Commit(testContext(t)), errdefs.ErrConflict)
	startLoop(t, c)
	evalTo(t, c, "1", "1")
	if err := c.Prepare(testContext(t), agentwire.Prepare{Sync: true}); err != nil {
		t.Fatal(err)
	}
	for _, leaf := range []string{"exec", "runner"} {
		if !isFrozen(t, filepath.Join(dir, "user", leaf)) {
			t.Fatalf("%s is not frozen", leaf)
		}
	}
	wantClass(t, c.Prepare(testContext(t), agentwire.Prepare{}), errdefs.ErrConflict)
	// An exec made meanwhile waits for the thaw.
	waiting := make(chan error, 1)
	go func() {
		_, err := c.Exec(testContext(t), agentwire.ExecRequest{Argv: []string{"true"}})
		waiting <- err
	}()
	if err := c.Commit(testContext(t)); err != nil {
		t.Fatal(err)
	}
	select {
	case err := <-waiting:
		t.Fatalf("exec ended while frozen: %v", err)
	default:
	}
	if err := c.VerdictSource(testContext(t)); err != nil {
		t.Fatal(err)
	}
	if isFrozen(t, filepath.Join(dir, "user", "exec")) {
		t.Fatal("still frozen")
	}
	if err := <-waiting; err != nil {
		t.Fatal(err)
	}
	evalTo(t, c, "2", "2")
}

func TestForkContract(t *testing.T) {
	dir := cgroupDir(t)
	rig := startAgent(t, "-cgroup", dir)
	c := rig.connect()
	hooks := filepath.Join(rig.root, "etc/forkd/resume.d")
	if err := os.MkdirAll(hooks, 0o755); err != nil {
		t.Fatal(err)
	}
	for name, text := range map[string]string{
		"10-good": "#!/bin/sh\necho $FORKD_SANDBOX_ID $FORKD_GENERATION $SHARD > " + rig.root + "/hooked\n",
		"20-bad":  "#!/bin/sh\necho wrong >&2\nexit 3\n",
	} {
		if err := os.WriteFile(filepath.Join(hooks, name), []byte(text), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	os.WriteFile(filepath.Join(hooks, "30-data"), []byte("not a program"), 0o644)
	startLoop(t, c)
	evalTo(t, c, "import random, uuid, tempfile, os\nrandom.seed(1)\ntempfile._get_candidate_names()\nrandom.getstate()[1][:0]", "()")
	genFile := filepath.Join(rig.root, "run/forkd/generation")
	before, err := os.Stat(genFile)
	if err != nil {
		t.Fatal(err)
	}
	if err := c.Prepare(testContext(t), agentwire.Prepare{}); err != nil {
		t.Fatal(err)
	}
	if err := c.Commit(testContext(t)); err != nil {
		t.Fatal(err)
	}
	c = rig.connect() // the daemon comes to a fork on a new connection
	r, err := c.VerdictFork(testContext(t), newIdentity(7))
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("receipt: %+v", r)
	want := []string{"kernel_csprng", "wall_clock", "hostname", "machine_id", "boot_id", "ssh_host_keys", "token", "env",
		"generation_file", "runner:python", "hook:10-good", "hook:20-bad", "tcp_connections", "thaw"}
	if got := stepNames(r); !slices.Equal(got, want) {
		t.Fatalf("steps %v, want %v", got, want)
	}
	if s := step(t, r, "hook:20-bad"); s.Status != "failed" || !strings.Contains(s.Detail, "exit code 3: wrong") {
		t.Fatalf("%+v", s)
	}
	for _, name := range []string{"hostname", "machine_id", "token", "generation_file", "runner:python", "hook:10-good", "thaw"} {
		if s := step(t, r, name); s.Status != "done" {
			t.Errorf("%+v", s)
		}
	}
	if r.ClockOffset.Abs() > ClockTolerance || len(r.NotCovered) != 0 || r.Duration <= 0 {
		t.Fatalf("%+v", r)
	}
	checkForkFiles(t, rig.root)
	after, err := os.Stat(genFile)
	if err != nil || !os.SameFile(before, after) {
		t.Fatalf("generation is another file: %v", err)
	}
	if isFrozen(t, filepath.Join(dir, "user", "exec")) {
		t.Fatal("still frozen")
	}
	if res := mustEval(t, c, "random.random()"); res.Result == "0.13436424411240122" {
		t.Fatal("random goes on as in the parent")
	}
	evalTo(t, c, "os.environ['SHARD'], os.environ['KEY'], tempfile._name_sequence", "('7', 'secret-7', None)")
	if res := mustExec(t, c, "sh", "-c", "echo $SHARD $KEY"); string(res.Stdout) != "7 secret-7\n" {
		t.Fatalf("%q", res.Stdout)
	}
	secondFork(t, c)
}

func checkForkFiles(t *testing.T, root string) {
	t.Helper()
	for file, want := range map[string]string{
		"etc/hostname": "fork-7\n", "etc/machine-id": strings.Repeat("7", 32) + "\n", "run/forkd/generation": "7\n",
		"run/forkd/token": "token-7\n", "run/forkd/boot_id": "00000000-0000-4000-8000-000000000007\n",
		"hooked": "sb" + strings.Repeat("7", 20) + " 7 7\n",
	} {
		if b, err := os.ReadFile(filepath.Join(root, file)); err != nil || string(b) != want {
			t.Errorf("%s holds %q, want %q: %v", file, b, want, err)
		}
	}
	if info, err := os.Stat(filepath.Join(root, "run/forkd/token")); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("token: %v %v", info.Mode(), err)
	}
}

// secondFork applies an identity again to a machine that was not frozen, as for a
// warm pool child: old secrets end, the generation must grow.
func secondFork(t *testing.T, c *Client) {
	t.Helper()
	_, err := c.VerdictFork(testContext(t), newIdentity(7))
	wantClass(t, err, errdefs.ErrInvalid)
	m := newIdentity(8)
	m.Secrets = nil
	m.Reseed = agentwire.ReseedSystem
	evalTo(t, c, "random.seed(1)", "")
	r, err := c.VerdictFork(testContext(t), m)
	if err != nil {
		t.Fatal(err)
	}
	if !slices.ContainsFunc(r.NotCovered, func(s string) bool { return strings.Contains(s, "not frozen") }) {
		t.Fatalf("%+v", r)
	}
	evalTo(t, c, "random.random(), os.environ['SHARD'], os.environ.get('KEY')", "(0.13436424411240122, '8', None)")
	if p := mustPing(t, c); p.Generation != 8 {
		t.Fatalf("%+v", p)
	}
}

func TestForkFailsClosed(t *testing.T) {
	dir := cgroupDir(t)
	rig := startAgent(t, "-cgroup", dir)
	c := rig.connect()
	startLoop(t, c)
	if err := os.MkdirAll(filepath.Join(rig.root, "etc/machine-id"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := c.Prepare(testContext(t), agentwire.Prepare{}); err != nil {
		t.Fatal(err)
	}
	_, err := c.VerdictFork(testContext(t), newIdentity(1))
	if err == nil || !strings.Contains(err.Error(), "machine_id") {
		t.Fatalf("error %v", err)
	}
	if !isFrozen(t, filepath.Join(dir, "user", "exec")) {
		t.Fatal("user processes run without an identity")
	}
	if err := c.VerdictSource(testContext(t)); err != nil {
		t.Fatal(err)
	}
}

func TestForkDuringEval(t *testing.T) {
	dir := cgroupDir(t)
	rig := startAgent(t, "-cgroup", dir)
	c := rig.connect()
	evalTo(t, c, "import random, time\nrandom.seed(1)", "")
	marker := rig.root + "/up"
	first := make(chan agentwire.EvalResult, 1)
	go func() {
		res, _ := c.Eval(t.Context(), agentwire.EvalRequest{Code: "open('" + marker + "','w').close()\nimport os\nwhile not os.path.exists('" + marker + "2'): time.sleep(0.001)\n'old'"})
		first <- res
	}()
	awaitFile(t, marker)
	if err := c.Prepare(testContext(t), agentwire.Prepare{}); err != nil {
		t.Fatal(err)
	}
	r, err := c.VerdictFork(testContext(t), newIdentity(3))
	if err != nil {
		t.Fatal(err)
	}
	if s := step(t, r, "runner:python"); s.Status != "failed" || len(r.NotCovered) == 0 {
		t.Fatalf("%+v", r)
	}
	os.WriteFile(marker+"2", nil, 0o644)
	if res := <-first; res.Result != "'old'" {
		t.Fatalf("%+v", res)
	}
	if res := mustEval(t, c, "random.random()"); res.Result == "0.13436424411240122" || res.Error != "" {
		t.Fatalf("not reseeded later: %+v", res)
	}
}

// TestEvalQueuedAtFork has an eval that came while its machine was frozen: the
// runner is idle and must be reseeded before it.
func TestEvalQueuedAtFork(t *testing.T) {
	rig := startAgent(t, "-cgroup", cgroupDir(t))
	c := rig.connect()
	evalTo(t, c, "import random\nrandom.seed(1)", "")
	if err := c.Prepare(testContext(t), agentwire.Prepare{}); err != nil {
		t.Fatal(err)
	}
	queued := make(chan agentwire.EvalResult, 1)
	go func() {
		res, _ := c.Eval(testContext(t), agentwire.EvalRequest{Code: "random.random()"})
		queued <- res
	}()
	mustPing(t, c)
	r, err := c.VerdictFork(testContext(t), newIdentity(3))
	if err != nil {
		t.Fatal(err)
	}
	if s := step(t, r, "runner:python"); s.Status != "done" || len(r.NotCovered) != 0 {
		t.Fatalf("%+v", r)
	}
	if res := <-queued; res.Error != "" || res.Result == "0.13436424411240122" || res.Result == "" {
		t.Fatalf("%+v", res)
	}
}

func TestWrongClockIsRefused(t *testing.T) {
	rig := startAgent(t)
	c, err := Connect(testContext(t), rig.dial(), Options{Now: func() time.Time { return time.Now().Add(time.Hour) }})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	_, err = c.VerdictFork(testContext(t), newIdentity(1)) // this agent cannot set its clock
	wantClass(t, err, errdefs.ErrGuest)
	wantClass(t, c.VerdictSource(testContext(t)), errdefs.ErrGuest)
	mustExec(t, c, "true")
}

func TestExecTimeoutExcludesFrozenTime(t *testing.T) {
	dir := cgroupDir(t)
	c := newClient(t, "-cgroup", dir)
	done := make(chan agentwire.ExecResult, 1)
	marker := t.TempDir() + "/up"
	go func() {
		res, _ := c.Exec(t.Context(), agentwire.ExecRequest{Argv: []string{"sh", "-c", "echo > " + marker + "; sleep 0.2"}, Timeout: time.Second})
		done <- res
	}()
	awaitFile(t, marker)
	if err := c.Prepare(testContext(t), agentwire.Prepare{}); err != nil {
		t.Fatal(err)
	}
	timer := time.NewTimer(1200 * time.Millisecond)
	<-timer.C
	if err := c.VerdictSource(testContext(t)); err != nil {
		t.Fatal(err)
	}
	if res := <-done; res.TimedOut {
		t.Fatalf("%+v", res)
	}
}
