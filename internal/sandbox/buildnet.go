package sandbox

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"forkd.dev/forkd/internal/agentwire"
	"forkd.dev/forkd/internal/buildnet"
	"forkd.dev/forkd/internal/errdefs"
	"forkd.dev/forkd/internal/guest"
)

// buildNetTime bounds the opening and the closing of a build's network; at the
// end an emulated guest clears hundreds of megabytes.
const buildNetTime = 3 * time.Minute

// buildNetwork is the network of one build while its commands run.
type buildNetwork struct {
	net    *buildnet.Network
	guest  *guest.Build
	env    map[string]string // of its commands
	cancel context.CancelFunc
	served chan struct{}
}

// withNetwork runs fn with the build's network open. When it returns without an
// error, nothing of the network is left in the guest.
func (b *builder) withNetwork(ctx context.Context, fn func(context.Context) error) error {
	if err := b.openNetwork(ctx); err != nil {
		return err
	}
	err := b.explain(fn(ctx))
	if b.online == nil {
		return err
	}
	defer func() { b.online = nil }()
	if err != nil {
		b.online.stop() // the guest ends with the failed build
		return err
	}
	b.progress("closing the network of the build", -1)
	return b.closeNetwork(ctx)
}

// openNetwork opens it, where there is one and somebody who uses it.
func (b *builder) openNetwork(ctx context.Context) error {
	builtin := b.req.Labels[builtinLabel] != ""
	if b.s.cfg.BuildNet == nil || builtin || len(b.req.Exec) == 0 && b.req.Warm == "" {
		return nil
	}
	settings := b.s.cfg.BuildNet()
	n, err := buildnet.New(buildnet.Config{Settings: settings, Allow: b.req.AllowHosts, Log: b.connected})
	if err != nil {
		return err
	}
	files, err := n.Archive()
	if err != nil {
		return err
	}
	b.progress("opening the network of the build", -1)
	var far *guest.Build
	err = b.call(ctx, buildNetTime, func(ctx context.Context, a Agent) (err error) {
		far, err = guest.OpenBuild(ctx, a, files)
		return err
	})
	if errors.Is(err, errdefs.ErrUnsupported) {
		b.log.step("no network for this build: %v", err)
		return nil
	}
	if err != nil {
		return err
	}
	b.log.step("allowed hosts: %s", strings.Join(n.Allowed(), " "))
	for _, note := range settings.Notes() {
		b.log.step("%s", note)
	}
	b.online = &buildNetwork{net: n, guest: far, env: n.Env(far.Proxy), served: make(chan struct{})}
	var serving context.Context
	serving, b.online.cancel = context.WithCancel(ctx)
	go func(o *buildNetwork) { // joined by stop
		defer close(o.served)
		if err := o.net.Serve(serving, o.guest.Accept); err != nil && serving.Err() == nil {
			b.log.step("the network of the build ended early: %v", err)
		}
	}(b.online)
	return nil
}

// stop ends the daemon's end.
func (o *buildNetwork) stop() {
	o.cancel()
	<-o.served
}

// closeNetwork ends it and waits until the guest has removed all of it.
func (b *builder) closeNetwork(ctx context.Context) error {
	b.online.stop()
	ctx, cancel := context.WithTimeout(ctx, buildNetTime)
	defer cancel()
	if err := b.online.guest.Close(ctx); err != nil {
		return err
	}
	t := b.online.net.Totals()
	b.log.step("network closed: %d connections, %s received, %s sent", t.Connections, bytesText(t.Received), bytesText(t.Sent))
	return nil
}

// connected notes the end of a connection in the build log.
func (b *builder) connected(c buildnet.Connection) {
	switch {
	case c.Refused != "":
		b.log.output([]byte("forkd: refused: " + c.Refused + "\n"))
	case c.Failed != "":
		b.log.output([]byte("forkd: failed: " + c.Host + ": " + c.Failed + "\n"))
	default:
		b.log.step("connected to %s: %s received, %s sent, %.1f s", c.Host, bytesText(c.Received), bytesText(c.Sent), c.Duration.Seconds())
	}
}

// explain adds the refused hosts to the error of a failed command.
func (b *builder) explain(err error) error {
	if err == nil || b.online == nil {
		return err
	}
	refused := b.online.net.Refused()
	if len(refused) == 0 {
		return err
	}
	const most = 10
	more := ""
	if len(refused) > most {
		more = fmt.Sprintf(" and %d more", len(refused)-most)
		refused = refused[:most]
	}
	return errdefs.WithHint(fmt.Errorf("%w\nhosts that were refused: %s%s", err, strings.Join(refused, "; "), more),
		"allow hosts of a build with --allow-host HOST")
}

// buildEnv is the environment of the build's commands.
func (b *builder) buildEnv() map[string]string {
	if b.online == nil {
		return nil
	}
	return b.online.env
}

// step is the text of a command's progress, with what the network has carried.
func (b *builder) step(what string, since time.Time) string {
	text := fmt.Sprintf("%s (%.0f s", what, time.Since(since).Seconds())
	if b.online != nil {
		if t := b.online.net.Totals(); t.Connections > 0 {
			text += fmt.Sprintf(", %s received, %d connections open", bytesText(t.Received), t.Open)
		}
	}
	return text + ")"
}

// tickTime is how often a command that runs is told about.
const tickTime = 5 * time.Second

// ticking tells the progress of what while fn runs.
func (b *builder) ticking(what string, fn func() error) error {
	b.progress(what, -1)
	begin := time.Now()
	stop, stopped := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(stopped)
		tick := time.NewTicker(tickTime)
		defer tick.Stop()
		for {
			select {
			case <-tick.C:
				b.tell(b.step(what, begin), -1)
			case <-stop:
				return
			}
		}
	}()
	err := fn()
	close(stop)
	<-stopped
	return err
}

// commands runs what the build was asked to run.
func (b *builder) commands(ctx context.Context) error {
	var before agentwire.Pong
	err := b.call(ctx, callSlack, func(ctx context.Context, a Agent) (err error) {
		before, err = a.Ping(ctx)
		return err
	})
	if err != nil {
		return err
	}
	for i, command := range b.req.Exec {
		what := fmt.Sprintf("running command %d of %d", i+1, len(b.req.Exec))
		if err := b.ticking(what, func() error { return b.exec(ctx, command) }); err != nil {
			return err
		}
	}
	if len(b.req.Exec) > 0 && before.WarmupReady {
		if err := b.refreshRunner(ctx, before.WallClock); err != nil {
			return err
		}
	}
	return b.warmWithEnv(ctx)
}

// staleModules is Python that lists the loaded modules whose files have changed
// since a time, or that would now be found elsewhere.
const staleModules = `(lambda ns: (exec(%s, ns), ns['out'])[1])({'since': %s})`

const staleSource = `
import sys, os, importlib.machinery as m
m.PathFinder.invalidate_caches()
out = []
for name, module in list(sys.modules.items()):
    old = getattr(getattr(module, '__spec__', None), 'origin', None)
    if '.' in name or name == '__main__' or not old or not os.path.isabs(old):
        continue
    try:
        now = m.PathFinder.find_spec(name)
        if now is None or now.origin != old or os.stat(old).st_ctime > since:
            out.append(name)
    except Exception:
        out.append(name)
`

// refreshRunner starts the warm interpreter anew if commands of the build changed
// modules that it has loaded: it would go on with the old ones, and what was
// installed beside them may need the new ones.
func (b *builder) refreshRunner(ctx context.Context, since time.Time) error {
	code := fmt.Sprintf(staleModules, pythonString(staleSource), strconv.FormatFloat(float64(since.UnixNano())/1e9, 'f', 3, 64))
	res, err := b.eval(ctx, code)
	if err != nil {
		return fmt.Errorf("look at the warm interpreter: %w", err)
	}
	if res.Error != "" || res.Result == "[]" || !res.HasResult {
		return nil // what cannot be told is left as it is
	}
	b.progress("restarting python: modules that it has loaded were changed", -1)
	b.log.step("modules that were loaded and changed: %.500s", res.Result)
	if _, err := b.eval(ctx, "__import__('os')._exit(0)"); err != nil {
		return fmt.Errorf("restart the warm interpreter: %w", err)
	}
	if err := b.warmStart(ctx, ""); err != nil {
		return errdefs.WithHint(err, "the warm code of an earlier snapshot no longer runs with what was installed")
	}
	return nil
}

// eval runs code of ours in the warm interpreter.
func (b *builder) eval(ctx context.Context, code string) (res agentwire.EvalResult, err error) {
	const limit = 2 * time.Minute
	err = b.call(ctx, limit+callSlack, func(ctx context.Context, a Agent) (err error) {
		res, err = a.Eval(ctx, agentwire.EvalRequest{Code: code, Timeout: limit})
		return err
	})
	return res, err
}

// warmWithEnv runs the warm code with the network's variables in the interpreter's
// environment, and takes them out again.
func (b *builder) warmWithEnv(ctx context.Context) error {
	env := b.buildEnv()
	if b.req.Warm == "" || env == nil {
		return b.warm(ctx)
	}
	if err := b.warmStart(ctx, ""); err != nil {
		return err
	}
	var set, unset strings.Builder
	for k, v := range env {
		fmt.Fprintf(&set, "%s: %s, ", pythonString(k), pythonString(v))
		fmt.Fprintf(&unset, "%s, ", pythonString(k))
	}
	change := func(code string) error {
		res, err := b.eval(ctx, code)
		if err == nil && res.Error != "" {
			err = errdefs.New(errdefs.ErrGuest, "%s", res.Error)
		}
		if err != nil {
			return fmt.Errorf("set the environment of warm code: %w", err)
		}
		return nil
	}
	// What the interpreter itself has of the same names comes back afterwards.
	const kept = "__import__('sys').modules['__forkd_env__']"
	save := "__import__('sys').modules['__forkd_env__'] = {k: __import__('os').environ.get(k) for k in (" + unset.String() + ")}; __import__('os').environ.update({" + set.String() + "})"
	if err := change(save); err != nil {
		return err
	}
	if err := b.warm(ctx); err != nil {
		return err
	}
	restore := "(lambda e, old: [e.pop(k, None) if v is None else e.__setitem__(k, v) for k, v in old.items()])(__import__('os').environ, " + kept + "); " +
		"__import__('sys').modules.pop('__forkd_env__'); None"
	return change(restore)
}

// pythonString is s as a Python literal.
func pythonString(s string) string {
	return strconv.QuoteToASCII(strings.ToValidUTF8(s, "?"))
}

// bytesText is a size for people.
func bytesText(n int64) string {
	switch {
	case n < 10<<10:
		return fmt.Sprintf("%d B", n)
	case n < 10<<20:
		return fmt.Sprintf("%d KiB", n>>10)
	}
	return fmt.Sprintf("%d MiB", n>>20)
}
