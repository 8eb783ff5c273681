package agent

import (
	"context"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"forkd.dev/forkd/internal/agentwire"
)

const (
	hookDir   = "/etc/forkd/resume.d"
	sshDir    = "/etc/ssh"
	hookTime  = 10 * time.Second
	hookLimit = 2 << 10 // bytes of a failed hook's output in the receipt
)

// runHooks runs the image's hooks in the order of their names, while other user
// processes are still frozen. A failing hook is in the receipt and no more.
func (f *fork) runHooks(ctx context.Context) {
	if !f.agent.capture.hooks {
		return
	}
	dir := f.agent.path(hookDir)
	entries, err := os.ReadDir(dir) // sorted
	if err != nil {
		return
	}
	for _, e := range entries {
		info, err := os.Stat(filepath.Join(dir, e.Name()))
		if err != nil || !info.Mode().IsRegular() || info.Mode()&0o111 == 0 {
			continue
		}
		status, detail := f.runTool(ctx, []string{filepath.Join(dir, e.Name())})
		f.step("hook:"+e.Name(), status, detail)
	}
}

// runTool runs a program as root in the hooks group, at most hookTime.
func (f *fork) runTool(ctx context.Context, argv []string) (status, detail string) {
	a := f.agent
	who, _ := lookupUser("")
	env := a.identity.environ(who)
	env["FORKD_SANDBOX_ID"] = f.m.SandboxID
	env["FORKD_GENERATION"] = strconv.FormatUint(f.m.Generation, 10)
	out := &sink{budget: &a.budget, limit: hookLimit}
	spec := startSpec{path: argv[0], argv: argv, env: flatten(env), dir: "/", group: a.groups.hooks, ours: true}
	run, err := a.startPiped(spec, nil, out, out)
	if err != nil {
		return "failed", err.Error()
	}
	late := false
	timer := time.NewTimer(hookTime)
	defer timer.Stop()
	select {
	case <-run.proc.done:
	case <-ctx.Done():
		run.kill()
	case <-timer.C:
		late = true
		run.kill()
	}
	run.finish()
	said := out.take()
	defer a.budget.give(said.reserved)
	var res agentwire.ExecResult
	describeExit(&res, run.proc)
	switch {
	case late:
		return "failed", "did not end within " + hookTime.String()
	case res.ExitCode != 0:
		return "failed", "exit code " + strconv.Itoa(res.ExitCode) + ": " + strings.TrimSpace(string(said.text()))
	}
	return "done", ""
}

// sshKeys replaces the host keys of an SSH server by new ones of the same types.
// The old ones are gone in any case, so that forks never share a key.
func (f *fork) sshKeys(ctx context.Context) {
	var keys []string
	if f.agent.capture.ssh {
		keys, _ = filepath.Glob(filepath.Join(f.agent.path(sshDir), "ssh_host_*_key"))
	}
	if len(keys) == 0 {
		f.step("ssh_host_keys", "absent", "")
		return
	}
	var details []string
	status := "done"
	for _, key := range keys {
		kind := strings.TrimSuffix(strings.TrimPrefix(filepath.Base(key), "ssh_host_"), "_key")
		if err := os.Remove(key); err != nil {
			status = "failed"
			details = append(details, err.Error())
			continue
		}
		os.Remove(key + ".pub")
		// An RSA key takes many seconds in an emulated guest; the other types stay.
		if kind != "ed25519" && kind != "ecdsa" {
			details = append(details, kind+" removed, not made anew")
			continue
		}
		tool, err := lookPath("ssh-keygen", "/", defaultPath)
		if err != nil {
			details = append(details, kind+" removed, no ssh-keygen")
			continue
		}
		if s, d := f.runTool(ctx, []string{tool, "-q", "-t", kind, "-N", "", "-f", key}); s != "done" {
			status = s
			details = append(details, kind+": "+d)
			continue
		}
		details = append(details, kind+" made anew")
	}
	f.step("ssh_host_keys", status, strings.Join(details, ", "))
}
