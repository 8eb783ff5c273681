package image

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/fstest"
	"time"

	"forkd.dev/forkd/internal/errdefs"
)

func TestHostMirrors(t *testing.T) {
	t.Parallel()
	const keyring = "/usr/share/keyrings/debian-archive-keyring.gpg"
	cases := []struct {
		name  string
		files map[string]string
		want  mirrors
	}{
		{"nothing configured", nil, defaultMirrors()},
		{"deb822", map[string]string{"sources.list.d/debian.sources": `# a comment
Types: deb deb-src
URIs: http://mirror.example/debian
Suites: bookworm bookworm-updates
Components: main contrib
Signed-By: ` + keyring + `

Types: deb
URIs: http://mirror.example/debian-security
Suites: bookworm-security
Components: main
Signed-By:
 ` + keyring + "\n"}, mirrors{"http://mirror.example/debian", "http://mirror.example/debian", "http://mirror.example/debian-security"}},
		{"one line, of another release, without security", map[string]string{"sources.list": `
# deb http://commented.example/debian trixie main
deb-src http://source.example/debian trixie main
deb cdrom:[Debian]/ trixie main
deb [arch=amd64 signed-by=` + keyring + `] https://cache.example:3142/a/b trixie main # note
`}, mirrors{"https://cache.example:3142/a/b", "", ""}},
		{"third parties and broken entries", map[string]string{
			"sources.list": "deb [signed-by=/usr/share/keyrings/other.gpg] https://other.example/debian bookworm main\n" +
				"deb https://packages.example/apt bookworm main\n" +
				"deb http://user:secret@mirror.example/debian bookworm main\n" +
				"deb [broken http://x.example/debian bookworm main\n" +
				"deb http://short.example/debian\n" +
				"deb file:/mnt/debian bookworm main\n" +
				"deb http://quote.example/'/debian bookworm main\n" +
				"debian http://word.example/debian bookworm main\n",
			"sources.list.d/off.sources":   "Types: deb\nEnabled: no\nURIs: http://off.example/debian\nSuites: bookworm\nComponents: main\n",
			"sources.list.d/other.list":    "deb http://docker.example/linux/debian bookworm stable\n",
			"sources.list.d/kept.disabled": "deb http://disabled.example/debian bookworm main\n",
			"sources.list.d/bad.sources":   " continuation first\nno colon\n: empty\n\n\n",
		}, defaultMirrors()},
	}
	for _, c := range cases {
		fsys := fstest.MapFS{}
		for name, text := range c.files {
			fsys[name] = &fstest.MapFile{Data: []byte(text)}
		}
		if got := hostMirrors(fsys); got != c.want {
			t.Errorf("%s: got %+v, want %+v", c.name, got, c.want)
		}
	}
}

func TestMirrorLines(t *testing.T) {
	t.Parallel()
	got := strings.Join(mirrors{"http://m/debian", "", "http://m/debian-security"}.lines("bookworm", "/k.gpg"), "\n")
	want := "deb [signed-by=/k.gpg] http://m/debian bookworm main\ndeb [signed-by=/k.gpg] http://m/debian-security bookworm-security main"
	if got != want {
		t.Errorf("got %s\nwant %s", got, want)
	}
	if got := (mirrors{archive: "http://m/debian"}).lines("bookworm", ""); len(got) != 1 || got[0] != "deb http://m/debian bookworm main" {
		t.Errorf("got %v", got)
	}
}

func TestExplainMmdebstrap(t *testing.T) {
	t.Parallel()
	for tail, want := range map[string]struct {
		class error
		text  string
	}{
		"Reading...\nE: Unable to locate package nosuch\nE: x":                {errdefs.ErrInvalid, `"nosuch"`},
		"E: Package 'virtual-thing' has no installation candidate":            {errdefs.ErrInvalid, `"virtual-thing"`},
		"E: Couldn't find any package by glob 'lib*x'":                        {errdefs.ErrInvalid, `"lib*x"`},
		"The following packages have unmet dependencies:\n a : Depends: b":    {errdefs.ErrInvalid, "cannot be installed together"},
		"dpkg: error: cannot copy: failed to write (No space left on device)": {errdefs.ErrResourceExhausted, "disk is full"},
		"E: You don't have enough free space in /var/cache/apt/archives/.":    {errdefs.ErrResourceExhausted, "disk is full"},
		"E: Failed to fetch http://m/x  Could not resolve 'm'":                {errdefs.ErrUnavailable, "mirror"},
		"something else": {errdefs.ErrInternal, "exit status 25"},
	} {
		err := explainMmdebstrap(fmt.Errorf("x: %w", &commandError{name: "mmdebstrap", err: errors.New("exit status 25"), tail: tail}))
		if errdefs.Class(err) != want.class || !strings.Contains(err.Error(), want.text) {
			t.Errorf("%q: class %v, %v", tail, errdefs.Class(err), err)
		}
	}
	if err := explainMmdebstrap(nil); err != nil {
		t.Errorf("success is explained as %v", err)
	}
}

func TestAptOutput(t *testing.T) {
	t.Parallel()
	name, err := parseDepends([]byte("linux-image-cloud-amd64\n  Depends: linux-image-6.1.0-57-cloud-amd64\n |Depends: other\n"))
	if err != nil || name != "linux-image-6.1.0-57-cloud-amd64" {
		t.Errorf("%q, %v", name, err)
	}
	for _, out := range []string{"", "  Depends: <linux-image>\n", "  Depends: linux-image-1 --option\n", "  Depends: bash\n"} {
		if _, err := parseDepends([]byte(out)); !errors.Is(err, errdefs.ErrNotFound) {
			t.Errorf("parseDepends(%q): %v, want ErrNotFound", out, err)
		}
	}
	sum := strings.Repeat("0a", 32)
	deb, err := parsePrintURIs([]byte("W: note\n'http://m/pool/k_1%3a2-3_amd64.deb' k_1%3a2-3_amd64.deb 267 SHA256:" + sum + "\n"))
	if err != nil || deb.file != "k_1%3a2-3_amd64.deb" || deb.version != "1:2-3" || deb.size != 267 || deb.sha256 != sum {
		t.Errorf("%+v, %v", deb, err)
	}
	for _, line := range []string{
		"", "'u' ../k_1_a.deb 1 SHA256:" + sum, "'u' k_1_a.deb -1 SHA256:" + sum, "'u' k_1_a.deb 1 MD5Sum:" + sum,
		"'u' k_1_a.deb 1 SHA256:abc", "'u' k.deb 1 SHA256:" + sum, "'u' k_1_a.deb 99999999999999999999 SHA256:" + sum,
	} {
		if _, err := parsePrintURIs([]byte(line)); !errors.Is(err, errdefs.ErrNotFound) {
			t.Errorf("parsePrintURIs(%q): %v, want ErrNotFound", line, err)
		}
	}
}

func TestTrimCacheDropsOldest(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	for i, name := range []string{"old.deb", "middle.deb", "new.deb"} {
		path, when := filepath.Join(dir, name), time.Unix(int64(1000+i), 0)
		if err := errors.Join(os.WriteFile(path, make([]byte, 100), 0o644), os.Chtimes(path, when, when)); err != nil {
			t.Fatal(err)
		}
	}
	if err := trimCache(dir, 250); err != nil {
		t.Fatal(err)
	}
	left, err := filepath.Glob(filepath.Join(dir, "*"))
	if err != nil || len(left) != 2 || filepath.Base(left[0]) != "middle.deb" || filepath.Base(left[1]) != "new.deb" {
		t.Errorf("left %v, %v", left, err)
	}
}

func FuzzSources(f *testing.F) {
	f.Add("deb [signed-by=x] http://m/debian bookworm main", "Types: deb\nURIs: http://m/debian\nSuites: bookworm\nComponents: main\n")
	f.Add("deb [", " x\n:")
	f.Fuzz(func(t *testing.T, list, deb822 string) {
		fsys := fstest.MapFS{"sources.list": {Data: []byte(list)}, "sources.list.d/a.sources": {Data: []byte(deb822)}}
		for _, line := range hostMirrors(fsys).lines("bookworm", "") {
			// What becomes an argument is one line of four plain words.
			if len(strings.Fields(line)) != 4 || strings.ContainsAny(line, "\n'\"$`\\[") {
				t.Fatalf("line %q", line)
			}
		}
	})
}
