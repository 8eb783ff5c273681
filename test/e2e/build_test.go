package e2e

import (
	"archive/tar"
	"context"
	"flag"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	forkd "forkd.dev/forkd/sdk/go"
)

var long = flag.Bool("long", false, "also what takes many minutes under emulation: large installations, 200 rollbacks, 200 branches")

// installPatience bounds the installation of packages in an emulated guest.
const installPatience = 20 * time.Minute

// install makes a snapshot whose commands may take long; it goes with the test.
func (w *world) install(t *testing.T, req forkd.SnapshotRequest) (forkd.Snapshot, error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), installPatience)
	defer cancel()
	if w.keep {
		w.cli(t, "snapshot", "rm", "--cascade", req.Tag)
	}
	t.Cleanup(func() {
		w.killAll(t)
		w.cli(t, "snapshot", "rm", "--cascade", req.Tag)
	})
	begin := time.Now()
	sn, err := w.client.CreateSnapshot(ctx, req, nil)
	t.Logf("%s: %v after %.0f s", req.Tag, strings.Join(req.Exec, "; "), time.Since(begin).Seconds())
	return sn, err
}

// inBuild holds in a build, and in no fork.
const inBuild = `test -n "$https_proxy" && test -s "$APT_CONFIG" && env | grep -q ^PIP_`

// residue lists what of a build's network is left in a guest.
const residue = `
env | grep -iE 'proxy|^PIP_|^npm_|APT_CONFIG|_CA_|SSL_CERT'
ls -d /run/forkd/build /var/cache/forkd-build /root/.cache/pip /root/.npm 2>/dev/null
ls /var/cache/apt/archives /var/lib/apt/lists | grep -E '\.deb$|_dists_'
grep -rlsE '/run/forkd/build|forkd-build|127\.0\.0\.1:3128|forkd\.invalid' /etc /root /home /opt /run /srv /tmp /var /usr/local --exclude=start-log
for e in /proc/[0-9]*/environ; do tr '\0' '\n' < $e 2>/dev/null | grep -iE '_proxy=|forkd/build' && echo $e; done
true`

// TestPipInstall is the second line of the first session, verbatim: packages come
// from the host's registry, all forks have them, and nothing of the way there.
func TestPipInstall(t *testing.T) {
	w := running(t)
	const tag = "e2e-data"
	_, err := w.install(t, forkd.SnapshotRequest{Tag: tag, Exec: []string{"pip install numpy pandas", inBuild}})
	if err != nil {
		t.Fatal(err)
	}
	children := w.fork(t, tag, 5)
	for _, sb := range children {
		if got := w.eval(t, sb.ID, "import numpy, pandas; int(pandas.Series(numpy.arange(4)).sum())"); got != "6" {
			t.Errorf("pandas in %s says %q", sb.ID, got)
		}
	}
	if left := w.exec(t, children[0].ID, residue); left != "" {
		t.Errorf("a fork has of the build's network:\n%s", left)
	}
	log := w.must(t, "logs", "--build", tag)
	for _, want := range []string{"$ pip install numpy pandas", "connected to ", "network closed"} {
		if !strings.Contains(log, want) {
			t.Errorf("the build log does not say %q:\n%s", want, log)
		}
	}
	w.killAll(t)
	if !*long {
		return
	}
	if _, err := w.install(t, forkd.SnapshotRequest{Tag: "e2e-learn", From: tag, Exec: []string{"pip install scikit-learn"}}); err != nil {
		t.Fatal(err)
	}
	if got := w.eval(t, w.fork(t, "e2e-learn", 1)[0].ID, "import sklearn, pandas; 1"); got != "1" {
		t.Errorf("sklearn says %q", got)
	}
}

// TestAptInstall: the same for Debian packages.
func TestAptInstall(t *testing.T) {
	w := running(t)
	_, err := w.install(t, forkd.SnapshotRequest{Tag: "e2e-apt", Image: "python", Exec: []string{"apt-get update", "apt-get install -y tree", inBuild}})
	if err != nil {
		t.Fatal(err)
	}
	id := w.fork(t, "e2e-apt", 1)[0].ID
	if got := w.exec(t, id, "tree --version"); !strings.HasPrefix(got, "tree v") {
		t.Errorf("tree printed %q", got)
	}
	if left := w.exec(t, id, residue); left != "" {
		t.Errorf("a fork has of the build's network:\n%s", left)
	}
}

// fetch is Python that asks for a page.
func fetch(url string) string {
	return `python3 -c 'import urllib.request as u; u.urlopen("` + url + `", timeout=60)'`
}

// TestUnlistedHost: who is not allowed is refused at once, and named.
func TestUnlistedHost(t *testing.T) {
	w := running(t)
	got := w.cli(t, "snapshot", "--tag", "e2e-refused", "--exec", fetch("https://unlisted.example/"))
	if got.code == 0 || !strings.Contains(got.stderr, "unlisted.example:443 is not allowed in this build") || !strings.Contains(got.stderr, "--allow-host") {
		t.Errorf("an unlisted host: %+v", got)
	}
	for _, url := range []string{"http://169.254.169.254/latest/", "http://127.0.0.1:8889/v1/sandboxes", "http://[::1]/"} {
		// Not by way of no_proxy: a hostile program asks the proxy all the same.
		script := `python3 -c 'import socket; s=socket.create_connection(("127.0.0.1",3128)); s.sendall(b"GET ` + url + ` HTTP/1.1\r\nHost: x\r\n\r\n"); r=s.recv(200); print(r); exit(r[9:12] != b"403")'`
		if got := w.cli(t, "snapshot", "--tag", "e2e-refused", "--exec", script, "--exec", "exit 7"); !strings.Contains(got.stderr, "exit code 7") {
			t.Errorf("%s: %+v", url, got)
		}
	}
	w.snapshot(t, "e2e-refused", "--exec", fetch("https://unlisted.example/")+" || true")
	if log := w.must(t, "logs", "--build", "e2e-refused"); !strings.Contains(log, "refused: unlisted.example:443") {
		t.Errorf("the build log does not name the host:\n%s", log)
	}
	for _, bad := range []string{"10.0.0.1", "localhost:0", "https://example.org", "*"} {
		if got := w.cli(t, "snapshot", "--tag", "e2e-x", "--allow-host", bad, "--exec", "true"); got.code != 2 && got.code != 1 || !strings.Contains(got.stderr, "allow host") {
			t.Errorf("--allow-host %s: %+v", bad, got)
		}
	}
}

// TestOffline: in a running sandbox look-ups and connections fail, and do not hang.
func TestOffline(t *testing.T) {
	w := running(t)
	id := w.fork(t, "py-base", 1)[0].ID
	const code = `
import socket
def why(f, *a):
    try:
        f(*a)
        return 'done'
    except OSError as e:
        return type(e).__name__ + ' ' + str(e.errno)
[why(socket.getaddrinfo, 'pypi.org', 443), why(socket.create_connection, ('8.8.8.8', 53)), why(socket.create_connection, ('127.0.0.1', 3128))]`
	res, err := w.client.Eval(t.Context(), id, forkd.EvalRequest{Code: code, TimeoutSecs: forkd.Seconds(20)})
	if err != nil || res.Result == nil || *res.Result != "['gaierror -3', 'OSError 101', 'ConnectionRefusedError 111']" {
		t.Errorf("%v, %s, %s", err, text(res.Result), text(res.Error))
	}
}

// TestImageOfArchive: a root file system of one program becomes an image, with a
// kernel that the user brought, and nothing unpacked leaves its place.
func TestImageOfArchive(t *testing.T) {
	w := running(t)
	dir := t.TempDir()
	source := filepath.Join(dir, "main.go")
	const program = "package main\n\nimport (\n\t\"fmt\"\n\t\"os\"\n)\n\nfunc main() { b, _ := os.ReadFile(\"/etc/motd\"); fmt.Print(string(b)) }\n"
	if err := os.WriteFile(source, []byte(program), 0o600); err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command("go", "build", "-o", filepath.Join(dir, "hello"), source)
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	hello, err := os.ReadFile(filepath.Join(dir, "hello"))
	if err != nil {
		t.Fatal(err)
	}
	archive := filepath.Join(dir, "root.tar")
	writeArchive(t, archive, map[string]string{"bin/hello": string(hello), "etc/motd": "made of an archive"})
	w.cli(t, "image", "rm", "e2e-tar")
	im := decoded[forkd.Image](t, w, "image", "build", "e2e-tar", "--from-tar", archive, "--disk", "512")
	t.Cleanup(func() { w.must(t, "image", "rm", im.ID) })
	if !strings.HasPrefix(im.Source, "tar:sha256:") {
		t.Errorf("image %+v", im)
	}
	w.snapshot(t, "e2e-tar", "--image", "e2e-tar")
	id := w.fork(t, "e2e-tar", 1)[0].ID
	if got := w.must(t, "exec", id, "--", "/bin/hello"); got != "made of an archive" {
		t.Errorf("the program printed %q", got)
	}
	writeArchive(t, archive, map[string]string{"../../../../../../tmp/forkd-e2e-escaped": "x"})
	if got := w.cli(t, "image", "build", "e2e-evil", "--from-tar", archive); got.code != 2 && got.code != 1 || !strings.Contains(got.stderr, "leads out") {
		t.Errorf("an archive that leaves its place: %+v", got)
	}
	kernels := decoded[[]forkd.Kernel](t, w, "kernel", "ls")
	if len(kernels) == 0 || !kernels[0].Default || kernels[0].Modules == 0 {
		t.Errorf("kernels %+v", kernels)
	}
	if got := w.cli(t, "kernel", "add", "e2e-bad", archive); got.code == 0 || !strings.Contains(got.stderr, "neither an ELF vmlinux nor a bzImage") {
		t.Errorf("a kernel that is none: %+v", got)
	}
}

func writeArchive(t *testing.T, path string, files map[string]string) {
	t.Helper()
	f, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	a := tar.NewWriter(f)
	for name, text := range files {
		if err := a.WriteHeader(&tar.Header{Typeflag: tar.TypeReg, Name: name, Mode: 0o755, Size: int64(len(text))}); err != nil {
			t.Fatal(err)
		}
		if _, err := io.WriteString(a, text); err != nil {
			t.Fatal(err)
		}
	}
	if err := a.Close(); err != nil {
		t.Fatal(err)
	}
}
