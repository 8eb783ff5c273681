package e2e

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	forkd "forkd.dev/forkd/sdk/go"
)

// page is Python that reads a page of the guest's own server.
func page(path string) string {
	return `__import__("urllib.request").request.urlopen("http://127.0.0.1:8000/` + path + `", timeout=20).read().decode()`
}

// TestStartedServer: a server that was started before the capture answers in every
// fork, out of files that were copied in, as the user it was to run as.
func TestStartedServer(t *testing.T) {
	w := running(t)
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "hello.txt"), []byte("hello"), 0o644); err != nil {
		t.Fatal(err)
	}
	sn := w.snapshot(t, "e2e-web", "--copy", dir+":/srv/web", "--start", `echo "$GREETING"; exec python3 -m http.server 8000 --bind 127.0.0.1`,
		"--cwd", "/srv/web", "--user", "nobody", "--env", "GREETING=here we go", "--ready-port", "8000", "--ready-log", "^here we go$", "--ready", "true")
	if st := sn.Recipe.Start; st == nil || st.ReadyPort != 8000 || !strings.HasPrefix(sn.Recipe.Files, "sha256:") {
		t.Errorf("recipe %+v", sn.Recipe)
	}
	each(t, w.fork(t, "e2e-web", 3), func(i int, sb forkd.Sandbox) error {
		if got := w.eval(t, sb.ID, page("hello.txt")); got != "'hello'" {
			return fmt.Errorf("the server of %s says %s", sb.ID, got)
		}
		w.exec(t, sb.ID, fmt.Sprintf("echo child %d > /srv/web/mine", i))
		if got := w.eval(t, sb.ID, page("mine")); got != fmt.Sprintf(`'child %d\n'`, i) {
			return fmt.Errorf("the server of %s says %s", sb.ID, got)
		}
		if got := w.exec(t, sb.ID, "stat -c %U $(grep -laz 127.0.0.1 /proc/[0-9]*/cmdline | grep -v self) 2>/dev/null | sort -u"); !strings.Contains(got, "nobody") {
			return fmt.Errorf("the server of %s runs as %q", sb.ID, got)
		}
		if got := w.exec(t, sb.ID, "stat -c %U /srv/web/hello.txt; head -1 /var/log/forkd-start.log"); got != "root\nhere we go\n" {
			return fmt.Errorf("%s has %q", sb.ID, got)
		}
		return nil
	})
}

// TestStartFails: no snapshot, the reason with the program's last words, nothing left.
func TestStartFails(t *testing.T) {
	w := running(t)
	before := len(machines(w.data))
	for _, c := range []struct {
		args []string
		code int
		says []string
	}{
		{[]string{"--start", "echo loading; sleep 1000", "--ready", "false", "--ready-timeout", "2s"}, 124, []string{"was not ready within 2s", "loading"}},
		{[]string{"--start", "echo no space left; exit 3", "--ready-port", "80"}, 1, []string{"ended with exit code 3", "no space left"}},
		{[]string{"--start", "seq 1 100000; sleep 1000", "--ready-log", "^never$", "--ready-timeout", "2s"}, 124, []string{"99951\n", "100000"}},
		{[]string{"--start", "true", "--user", "nobody-here"}, 1, []string{"nobody-here"}},
		{[]string{"--ready", "true"}, 2, []string{"--start"}},
		{[]string{"--start", "true", "--ready-log", "("}, 1, []string{"regular expression"}},
		{[]string{"--copy", "/nowhere/at/all:/x"}, 1, []string{"/nowhere/at/all"}},
		{[]string{"--copy", "x"}, 1, []string{"SRC:DST"}},
	} {
		got := w.cli(t, append([]string{"snapshot", "--tag", "e2e-never"}, c.args...)...)
		if got.code != c.code && (c.code == 124 || got.code == 0) {
			t.Errorf("%v: exit code %d, want %d\n%s", c.args, got.code, c.code, got.stderr)
		}
		for _, want := range c.says {
			if !strings.Contains(got.stderr, want) {
				t.Errorf("%v: the error does not say %q:\n%.3000s", c.args, want, got.stderr)
			}
		}
		if strings.Contains(got.stderr, "\n  99950\n") {
			t.Errorf("%v: more than the last 50 lines", c.args)
		}
	}
	if got := w.cli(t, "snapshot", "info", "e2e-never"); got.code != 3 {
		t.Errorf("a snapshot is left: %+v", got)
	}
	eventually(t, func() error {
		if n := len(machines(w.data)); n > before {
			return fmt.Errorf("%d machines are left, %d were there before", n, before)
		}
		return nil
	})
}

// TestPostgres: a warm database for each fork, of one snapshot.
func TestPostgres(t *testing.T) {
	w := running(t)
	w.cli(t, "image", "rm", "e2e-pg")
	im := decoded[forkd.Image](t, w, "image", "build", "--tag", "e2e-pg", "postgresql")
	t.Cleanup(func() { w.must(t, "image", "rm", im.ID) })
	w.snapshot(t, "e2e-pg", "--image", "e2e-pg", "--start", "exec pg_ctlcluster 15 main start --foreground", "--ready", "pg_isready")
	each(t, w.fork(t, "e2e-pg", 10), func(i int, sb forkd.Sandbox) error {
		query := fmt.Sprintf("create table t(x int); insert into t values (%d); select sum(x) + 1000 from t", i)
		res, err := w.client.Exec(t.Context(), sb.ID, forkd.ExecRequest{
			Args: []string{"psql", "--quiet", "--no-psqlrc", "-Atc", query}, User: "postgres", TimeoutSecs: forkd.Seconds(60),
		})
		if err != nil || res.ExitCode != 0 || res.Stdout != fmt.Sprintf("%d\n", 1000+i) {
			return fmt.Errorf("%s: %v, %+v", sb.ID, err, res)
		}
		return nil
	})
}
