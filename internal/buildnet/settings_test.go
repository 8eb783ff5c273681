package buildnet

import (
	"archive/tar"
	"encoding/pem"
	"errors"
	"io"
	"io/fs"
	"maps"
	"slices"
	"strings"
	"testing"
)

// host is a host in the form of its files and environment.
type host struct {
	files, env map[string]string
	apt        []string
}

func (h host) detect() Settings {
	return Detect(Source{
		Getenv: func(name string) string { return h.env[name] },
		ReadFile: func(path string) ([]byte, error) {
			text, ok := h.files[path]
			if !ok {
				return nil, fs.ErrNotExist
			}
			return []byte(text), nil
		},
		Glob: func(pattern string) ([]string, error) {
			var out []string
			for name := range maps.Keys(h.files) {
				if strings.HasPrefix(name, strings.TrimSuffix(pattern, "*")) {
					out = append(out, name)
				}
			}
			return out, nil
		},
		AptSources: h.apt,
	})
}

func (s Settings) names() []string {
	var out []string
	for _, r := range s.registries {
		out = append(out, r.String())
	}
	slices.Sort(out)
	return out
}

func TestDetectDefaults(t *testing.T) {
	t.Parallel()
	s := host{env: map[string]string{"HOME": "/root"}, apt: []string{"deb http://deb.debian.org/debian bookworm main"}}.detect()
	want := []string{"deb.debian.org", "files.pythonhosted.org", "pypi.org", "registry.npmjs.org"}
	if got := s.names(); !slices.Equal(got, want) {
		t.Errorf("registries %v, want %v", got, want)
	}
	for _, name := range []string{"PIP_INDEX_URL", "npm_config_registry", "SSL_CERT_FILE"} {
		if v, ok := s.env[name]; ok {
			t.Errorf("%s is set to %q, but nothing was configured", name, v)
		}
	}
	if strings.Contains(string(s.files["apt.conf"]), "CaInfo") {
		t.Error("apt is told of certificates that are not there")
	}
}

func TestDetectMirrors(t *testing.T) {
	t.Parallel()
	cert := string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: []byte("one")}))
	other := string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: []byte("two")}))
	s := host{
		env: map[string]string{
			"HOME": "/home/u", "PIP_EXTRA_INDEX_URL": "https://user:secret@extra.example/simple", "SSL_CERT_FILE": "/ca.pem",
			"HTTPS_PROXY": "http://u:p@proxy.example:3128", "NO_PROXY": "pip.example",
		},
		files: map[string]string{
			"/etc/pip.conf":                      "[global]\nindex-url = https://pip.example:8443/simple\ntrusted-host =\n  pip.example\n  extra.example\n[freeze]\nindex-url = https://wrong.example/\n",
			"/home/u/.npmrc":                     "registry=https://npm.example/\n@corp:registry=https://corp.example/npm\n//npm.example/:_authToken=s3cret\n; comment\ncafile=/npm.pem\nbad=${HOME}\n",
			"/etc/apt/apt.conf.d/02proxy":        `Acquire::http::Proxy "http://10.1.1.1:3142";` + "\nAcquire::Check-Date \"false\";\n",
			"/ca.pem":                            cert + "-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n",
			"/npm.pem":                           cert + other,
			"/etc/ssl/certs/ca-certificates.crt": other,
		},
		apt: []string{"deb [signed-by=/k.gpg] http://user:pw@apt.example/debian bookworm main"},
	}.detect()
	want := []string{"apt.example", "corp.example", "extra.example", "npm.example", "pip.example:8443"}
	if got := s.names(); !slices.Equal(got, want) {
		t.Errorf("registries %v, want %v", got, want)
	}
	for name, want := range map[string]string{
		"PIP_INDEX_URL": "https://pip.example:8443/simple", "PIP_EXTRA_INDEX_URL": "https://extra.example/simple",
		"PIP_TRUSTED_HOST": "pip.example extra.example", "npm_config_registry": "https://npm.example/",
		"SSL_CERT_FILE": "/run/forkd/build/ca.pem", "PIP_BREAK_SYSTEM_PACKAGES": "1",
	} {
		if s.env[name] != want {
			t.Errorf("%s is %q, want %q", name, s.env[name], want)
		}
	}
	if got := string(s.files["ca.pem"]); got != cert+other {
		t.Errorf("certificates:\n%s", got)
	}
	if got := string(s.files["sources.list"]); got != "deb [signed-by=/k.gpg] http://apt.example/debian bookworm main\n" {
		t.Errorf("sources.list: %s", got)
	}
	if got := string(s.files["npmrc"]); got != "@corp:registry=https://corp.example/npm\n" {
		t.Errorf("npmrc: %s", got)
	}
	everything := strings.Join(slices.Collect(maps.Values(s.env)), "\n")
	for _, data := range s.files {
		everything += string(data)
	}
	for _, secret := range []string{"secret", "s3cret", "pw@", "u:p", "proxy.example", "10.1.1.1", "PRIVATE"} {
		if strings.Contains(everything, secret) {
			t.Errorf("a build is told %q", secret)
		}
	}
	if len(s.Notes()) != 2 {
		t.Errorf("notes %q, want one for each address with credentials", s.Notes())
	}
	for target, want := range map[string]string{
		"apt.example:80": "http://10.1.1.1:3142", "npm.example:443": "http://u:p@proxy.example:3128", "pip.example:8443": "", "other.example:80": "",
	} {
		to, _ := parseTarget(target, 0)
		u, err := s.proxyFor(to)
		got := ""
		if u != nil {
			got = u.String()
		}
		if err != nil || got != want {
			t.Errorf("proxy for %s is %q (%v), want %q", target, got, err, want)
		}
	}
	if !s.isProxy("10.1.1.1:3142") || !s.isProxy("proxy.example:3128") || s.isProxy("apt.example:80") {
		t.Error("proxies are not told from others")
	}
}

func TestArchive(t *testing.T) {
	t.Parallel()
	n, err := New(Config{Settings: host{env: map[string]string{}}.detect()})
	if err != nil {
		t.Fatal(err)
	}
	r, err := n.Archive()
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for archive := tar.NewReader(r); ; {
		h, err := archive.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		names = append(names, h.Name)
	}
	if !slices.Contains(names, "run/forkd/build/apt.conf") || !slices.Contains(names, "var/cache/forkd-build/apt/lists/partial/") {
		t.Errorf("archive holds %v", names)
	}
	if env := n.Env("127.0.0.1:3128"); env["https_proxy"] != "http://127.0.0.1:3128" || env["HTTP_PROXY"] != "http://127.0.0.1:3128" {
		t.Errorf("environment %v", env)
	}
}
