package buildnet

import (
	"archive/tar"
	"bytes"
	"fmt"
	"io"
	"net/url"
	"os"
	"slices"
	"strings"
	"time"

	"forkd.dev/forkd/internal/agentwire"
	"forkd.dev/forkd/internal/errdefs"
)

// Source says where [Detect] looks.
type Source struct {
	Getenv func(string) string // nil means os.Getenv
	// ReadFile reads a file of the host; nil means a bounded os.ReadFile.
	ReadFile func(path string) ([]byte, error)
	// Glob lists files of the host; nil means none of the directories are read.
	Glob func(pattern string) ([]string, error)
	// AptSources are lines of sources.list that name the host's Debian mirrors.
	AptSources []string
}

// Settings are the registries of this host and what programs of a build need to
// use them. They hold no credentials: user names in addresses stay here.
type Settings struct {
	registries []rule
	env        map[string]string // of programs of the build
	files      map[string][]byte // in agentwire.BuildDir
	proxies    map[string]*url.URL
	byEnv      hostProxy
	notes      []string
}

// Notes says in words what could not be taken over.
func (s Settings) Notes() []string { return s.notes }

// registry is where one package manager gets its packages.
type registry struct {
	address string   // the host's setting
	also    []string // further hosts of it
	proxy   string   // only for this one
}

// Detect reads how the host's pip, apt and npm are configured. A setting that
// cannot be read counts as not made.
func Detect(src Source) Settings {
	d := &detector{src: src, s: Settings{env: map[string]string{}, files: map[string][]byte{}, proxies: map[string]*url.URL{}}}
	if d.src.Getenv == nil {
		d.src.Getenv = os.Getenv
	}
	if d.src.ReadFile == nil {
		d.src.ReadFile = readBounded
	}
	d.s.byEnv = newHostProxy(d.src.Getenv)
	d.pip()
	d.apt()
	d.npm()
	d.bundle()
	d.proxyVariables()
	return d.s
}

type detector struct {
	src   Source
	s     Settings
	roots []string // files of certificates that the host's tools are told to use
}

const maxConfig = 4 << 20

func readBounded(path string) ([]byte, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, fmt.Errorf("read setting: %w", err)
	}
	defer f.Close()
	if info, err := f.Stat(); err != nil || !info.Mode().IsRegular() || info.Size() > maxConfig {
		return nil, errdefs.New(errdefs.ErrInvalid, "read setting: %s is no regular file of at most %d bytes", path, maxConfig)
	}
	return io.ReadAll(f)
}

// add takes a registry and returns its address as a build may see it, or "".
func (d *detector) add(r registry) string {
	u, err := url.Parse(strings.TrimSpace(r.address))
	if err != nil || (u.Scheme != "http" && u.Scheme != "https") || u.Host == "" {
		return ""
	}
	if u.User != nil {
		d.s.notes = append(d.s.notes, "the credentials for "+u.Host+" are not carried into the build")
		u.User = nil
	}
	for _, host := range append([]string{u.Host}, r.also...) {
		if !d.allow(host, r.proxy) {
			return ""
		}
	}
	return u.String()
}

// allow makes a rule for the host of a registry: its own port, or 80 and 443.
func (d *detector) allow(host, proxy string) bool {
	t, ok := parseTarget(host, 443)
	if !ok {
		return false
	}
	one := rule{host: t.host, port: t.port, registry: true}
	if t.port == 80 || t.port == 443 {
		one.port = 0
	}
	if !slices.Contains(d.s.registries, one) {
		d.s.registries = append(d.s.registries, one)
	}
	if proxy != "" && !strings.EqualFold(proxy, "direct") {
		if u, err := parseProxy(proxy); err == nil {
			d.s.proxies[t.host] = u
		}
	}
	return true
}

// proxyFor returns the host's proxy for t, or nil.
func (s Settings) proxyFor(t target) (*url.URL, error) {
	if u := s.proxies[t.host]; u != nil {
		return u, nil
	}
	return s.byEnv.find(t)
}

// isProxy tells whether address is that of a proxy of the host.
func (s Settings) isProxy(address string) bool {
	for _, u := range s.proxies {
		if proxyAddress(u) == address {
			return true
		}
	}
	for _, text := range []string{s.byEnv.plain, s.byEnv.secure} {
		if u, err := parseProxy(text); err == nil && proxyAddress(u) == address {
			return true
		}
	}
	return false
}

// proxyVariables sets what sends programs to the proxy of the build.
func (d *detector) proxyVariables() {
	for _, name := range []string{"http_proxy", "https_proxy"} {
		d.s.env[name] = proxyMark
		d.s.env[strings.ToUpper(name)] = proxyMark
	}
	d.s.env["no_proxy"] = "localhost,127.0.0.1,::1"
	d.s.env["NO_PROXY"] = d.s.env["no_proxy"]
}

// proxyMark stands for the address of the proxy until it is known.
const proxyMark = "http://forkd.invalid:3128"

// Env returns the environment of programs of a build whose proxy listens at proxy.
func (n *Network) Env(proxy string) map[string]string {
	out := make(map[string]string, len(n.settings.env))
	for k, v := range n.settings.env {
		out[k] = strings.ReplaceAll(v, proxyMark, "http://"+proxy)
	}
	return out
}

// Archive returns the files of a build as a tar archive of paths in the guest.
func (n *Network) Archive() (io.Reader, error) {
	var buf bytes.Buffer
	w := tar.NewWriter(&buf)
	for _, dir := range []string{"apt/lists/partial", "apt/cache/archives/partial"} {
		if err := w.WriteHeader(&tar.Header{Typeflag: tar.TypeDir, Name: inCache(dir)[1:] + "/", Mode: 0o755}); err != nil {
			return nil, fmt.Errorf("pack settings of the build: %w", err)
		}
	}
	for name, data := range n.settings.files {
		h := &tar.Header{Typeflag: tar.TypeReg, Name: inBuild(name)[1:], Mode: 0o644, Size: int64(len(data)), ModTime: time.Unix(0, 0)}
		if err := w.WriteHeader(h); err != nil {
			return nil, fmt.Errorf("pack settings of the build: %w", err)
		}
		if _, err := w.Write(data); err != nil {
			return nil, fmt.Errorf("pack settings of the build: %w", err)
		}
	}
	if err := w.Close(); err != nil {
		return nil, fmt.Errorf("pack settings of the build: %w", err)
	}
	return &buf, nil
}

// inBuild is the path of a file of the build in the guest.
func inBuild(name string) string { return agentwire.BuildDir + "/" + name }

// inCache is a path that is removed after the build.
func inCache(name string) string { return agentwire.BuildCacheDir + "/" + name }
