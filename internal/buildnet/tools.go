package buildnet

import (
	"bytes"
	"cmp"
	"encoding/pem"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
)

// Where package managers go if nothing else is configured. PyPI keeps its files on
// a host of their own.
const (
	pypiIndex   = "https://pypi.org/simple"
	pypiFiles   = "files.pythonhosted.org"
	npmRegistry = "https://registry.npmjs.org/"
)

// pip reads pip's files and environment.
func (d *detector) pip() {
	conf := map[string]string{}
	home := d.src.Getenv("HOME")
	config := cmp.Or(d.src.Getenv("XDG_CONFIG_HOME"), filepath.Join(home, ".config"))
	for _, path := range []string{
		"/etc/xdg/pip/pip.conf", "/etc/pip.conf", filepath.Join(home, ".pip/pip.conf"), filepath.Join(config, "pip/pip.conf"),
		d.src.Getenv("PIP_CONFIG_FILE"),
	} {
		if data, err := d.src.ReadFile(path); path != "" && err == nil {
			parsePip(string(data), conf)
		}
	}
	for _, key := range []string{"index-url", "extra-index-url", "trusted-host", "cert", "proxy", "default-timeout"} {
		if v := d.src.Getenv("PIP_" + strings.ToUpper(strings.ReplaceAll(key, "-", "_"))); v != "" {
			conf[key] = v
		}
	}
	main := registry{address: cmp.Or(conf["index-url"], pypiIndex), proxy: conf["proxy"]}
	if strings.Contains(main.address, "//pypi.org/") {
		main.also = []string{pypiFiles}
	}
	if at := d.add(main); at != "" && at != pypiIndex {
		d.s.env["PIP_INDEX_URL"] = at
	}
	var extra []string
	for _, address := range strings.Fields(conf["extra-index-url"]) {
		if at := d.add(registry{address: address, proxy: conf["proxy"]}); at != "" {
			extra = append(extra, at)
		}
	}
	d.set("PIP_EXTRA_INDEX_URL", strings.Join(extra, " "))
	d.set("PIP_TRUSTED_HOST", strings.Join(strings.Fields(conf["trusted-host"]), " "))
	d.set("PIP_DEFAULT_TIMEOUT", cmp.Or(conf["default-timeout"], "60")) // an emulated guest is slow
	d.roots = append(d.roots, conf["cert"])
	for k, v := range map[string]string{
		"PIP_NO_CACHE_DIR": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_INPUT": "1", "PIP_PROGRESS_BAR": "off",
		// A snapshot is as disposable as a container: packages may go into the system's Python.
		"PIP_BREAK_SYSTEM_PACKAGES": "1", "PIP_ROOT_USER_ACTION": "ignore",
		"UV_CACHE_DIR": inCache("uv"),
	} {
		d.s.env[k] = v
	}
}

func (d *detector) set(name, value string) {
	if value != "" {
		d.s.env[name] = value
	}
}

// parsePip reads the sections of a pip.conf that count for installing.
func parsePip(text string, into map[string]string) {
	section, last := "", ""
	for line := range strings.Lines(text) {
		trimmed := strings.TrimSpace(line)
		switch {
		case trimmed == "" || trimmed[0] == '#' || trimmed[0] == ';':
		case trimmed[0] == '[':
			section, last = strings.ToLower(strings.Trim(trimmed, "[]")), ""
		case section != "global" && section != "install":
		case (line[0] == ' ' || line[0] == '\t') && last != "":
			into[last] += " " + trimmed
		default:
			if key, value, ok := cutAny(trimmed, "=:"); ok {
				last = strings.ReplaceAll(strings.ToLower(strings.TrimSpace(key)), "_", "-")
				into[last] = strings.TrimSpace(value)
			}
		}
	}
}

func cutAny(s, chars string) (before, after string, found bool) {
	if i := strings.IndexAny(s, chars); i >= 0 {
		return s[:i], s[i+1:], true
	}
	return s, "", false
}

var (
	aptProxy  = regexp.MustCompile(`(?i)Acquire::(https?)::Proxy\s+"([^"]*)"`)
	aptOption = regexp.MustCompile(`(?i)(Acquire::Check-(?:Valid-Until|Date))\s+"(true|false|yes|no|0|1)"`)
)

// apt takes the mirrors, and of apt.conf what they need.
func (d *detector) apt() {
	proxies := map[string]string{}
	conf := []string{ // the proxy is in the environment
		`Acquire::https::CaInfo "` + inBuild(bundleName) + `";`,
		// What lists and packages leave goes with the build.
		`Dir::State::Lists "` + inCache("apt/lists") + `/";`, `Dir::Cache "` + inCache("apt/cache") + `/";`,
		`APT::Sandbox::User "root";`, `APT::Install-Recommends "false";`, `Acquire::GzipIndexes "true";`, `Acquire::Languages "none";`,
	}
	for _, path := range d.aptFiles() {
		data, err := d.src.ReadFile(path)
		if err != nil {
			continue
		}
		for _, m := range aptProxy.FindAllStringSubmatch(string(data), -1) {
			proxies[strings.ToLower(m[1])] = m[2]
		}
		for _, m := range aptOption.FindAllStringSubmatch(string(data), -1) {
			conf = append(conf, m[1]+` "`+m[2]+`";`)
		}
	}
	var lines []string
	for _, line := range d.src.AptSources {
		fields := strings.Fields(line)
		i := slices.IndexFunc(fields, func(f string) bool { return strings.Contains(f, "://") })
		if i < 0 {
			continue
		}
		scheme, _, _ := strings.Cut(fields[i], "://")
		at := d.add(registry{address: fields[i], proxy: proxies[scheme]})
		if at != "" {
			fields[i] = at
			lines = append(lines, strings.Join(fields, " "))
		}
	}
	if len(lines) > 0 {
		d.s.files["sources.list"] = []byte(strings.Join(lines, "\n") + "\n")
		conf = append(conf, `Dir::Etc::SourceList "`+inBuild("sources.list")+`";`)
	}
	d.s.files["apt.conf"] = []byte(strings.Join(conf, "\n") + "\n")
	d.s.env["APT_CONFIG"] = inBuild("apt.conf")
	d.s.env["DEBIAN_FRONTEND"] = "noninteractive"
}

func (d *detector) aptFiles() []string {
	files := []string{"/etc/apt/apt.conf"}
	if d.src.Glob != nil {
		more, err := d.src.Glob("/etc/apt/apt.conf.d/*")
		if err == nil {
			slices.Sort(more)
			files = append(more, files...)
		}
	}
	return files
}

// npm reads npm's files and environment. Tokens stay here.
func (d *detector) npm() {
	conf := map[string]string{}
	home := d.src.Getenv("HOME")
	for _, path := range []string{
		"/usr/etc/npmrc", "/usr/local/etc/npmrc", "/etc/npmrc", cmp.Or(d.env("npm_config_globalconfig")),
		cmp.Or(d.env("npm_config_userconfig"), filepath.Join(home, ".npmrc")),
	} {
		if data, err := d.src.ReadFile(path); path != "" && err == nil {
			parseNpm(string(data), conf)
		}
	}
	for _, key := range []string{"registry", "cafile", "proxy", "https-proxy"} {
		if v := d.env("npm_config_" + strings.ReplaceAll(key, "-", "_")); v != "" {
			conf[key] = v
		}
	}
	proxy := cmp.Or(conf["https-proxy"], conf["proxy"])
	if at := d.add(registry{address: cmp.Or(conf["registry"], npmRegistry), proxy: proxy}); at != "" && at != npmRegistry {
		d.s.env["npm_config_registry"] = at
		// A lock file would name the mirror in every fork.
		d.s.env["npm_config_omit_lockfile_registry_resolved"] = "true"
	}
	var scopes []string
	for key, value := range conf {
		if scope, ok := strings.CutSuffix(key, ":registry"); ok && strings.HasPrefix(scope, "@") {
			if at := d.add(registry{address: value, proxy: proxy}); at != "" {
				scopes = append(scopes, scope+":registry="+at)
			}
		}
	}
	if slices.Sort(scopes); len(scopes) > 0 {
		d.s.files["npmrc"] = []byte(strings.Join(scopes, "\n") + "\n")
		d.s.env["npm_config_userconfig"] = inBuild("npmrc")
	}
	d.roots = append(d.roots, conf["cafile"])
	d.s.env["npm_config_cache"] = inCache("npm")
	d.s.env["npm_config_update_notifier"] = "false"
}

// env reads a variable in either case.
func (d *detector) env(name string) string {
	return cmp.Or(d.src.Getenv(name), d.src.Getenv(strings.ToUpper(name)))
}

func parseNpm(text string, into map[string]string) {
	for line := range strings.Lines(text) {
		line = strings.TrimSpace(line)
		if line == "" || line[0] == '#' || line[0] == ';' || line[0] == '[' {
			continue
		}
		key, value, ok := strings.Cut(line, "=")
		value = strings.Trim(strings.TrimSpace(value), `"'`)
		if ok && !strings.Contains(value, "${") {
			into[strings.TrimSpace(key)] = value
		}
	}
}

const (
	bundleName = "ca.pem"
	maxBundle  = 4 << 20
)

// bundle gives programs of the build the certificates that the host trusts.
func (d *detector) bundle() {
	files := append([]string{
		d.src.Getenv("SSL_CERT_FILE"), d.src.Getenv("REQUESTS_CA_BUNDLE"), d.src.Getenv("CURL_CA_BUNDLE"),
		d.src.Getenv("NODE_EXTRA_CA_CERTS"), "/etc/ssl/certs/ca-certificates.crt", "/etc/pki/tls/certs/ca-bundle.crt",
	}, d.roots...)
	seen := map[string]bool{}
	var out bytes.Buffer
	for _, path := range files {
		if path == "" || seen[path] {
			continue
		}
		seen[path] = true
		data, err := d.src.ReadFile(path)
		if err != nil {
			continue
		}
		for block, rest := pem.Decode(data); block != nil; block, rest = pem.Decode(rest) {
			if block.Type != "CERTIFICATE" || seen[string(block.Bytes)] || out.Len()+len(block.Bytes) > maxBundle {
				continue
			}
			seen[string(block.Bytes)] = true
			block.Headers = nil
			_ = pem.Encode(&out, block) // a buffer takes all
		}
	}
	if out.Len() == 0 {
		d.s.files["apt.conf"] = bytes.ReplaceAll(d.s.files["apt.conf"], []byte(`Acquire::https::CaInfo "`+inBuild(bundleName)+`";`+"\n"), nil)
		return
	}
	d.s.files[bundleName] = out.Bytes()
	for _, name := range []string{"SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "GIT_SSL_CAINFO", "NODE_EXTRA_CA_CERTS", "PIP_CERT"} {
		d.s.env[name] = inBuild(bundleName)
	}
}
