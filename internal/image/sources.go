package image

import (
	"io/fs"
	"net/url"
	"path"
	"slices"
	"strings"
)

const (
	defaultMirror   = "http://deb.debian.org/debian"
	defaultSecurity = "http://deb.debian.org/debian-security"
	debianKeyring   = "/usr/share/keyrings/debian-archive-keyring.gpg"

	maxSourceFile = 1 << 20
)

// mirrors is where packages of one Debian suite come from. An empty field is a
// pocket that is not used; archive is never empty.
type mirrors struct{ archive, updates, security string }

func defaultMirrors() mirrors {
	return mirrors{archive: defaultMirror, updates: defaultMirror, security: defaultSecurity}
}

// lines returns the mirrors as lines of sources.list. keyring may be empty.
func (m mirrors) lines(suite, keyring string) []string {
	option := ""
	if keyring != "" {
		option = "[signed-by=" + keyring + "] "
	}
	out := []string{"deb " + option + m.archive + " " + suite + " main"}
	if m.updates != "" {
		out = append(out, "deb "+option+m.updates+" "+suite+"-updates main")
	}
	if m.security != "" {
		out = append(out, "deb "+option+m.security+" "+suite+"-security main")
	}
	return out
}

// aptSource is one entry of apt's configuration, for one address and suite.
type aptSource struct {
	uri, suite string
	components []string
	signedBy   string
}

// hostMirrors reads the host's apt configuration (etc is /etc/apt) and returns the
// mirrors of Debian it names, or Debian's default. Which release the host itself
// follows does not matter: all releases are on the same mirrors.
func hostMirrors(etc fs.FS) mirrors {
	var m mirrors
	for _, src := range readSources(etc) {
		if !src.isDebian() {
			continue
		}
		switch {
		case strings.HasSuffix(src.suite, "-security"):
			setOnce(&m.security, src.uri)
		case strings.HasSuffix(src.suite, "-updates"):
			setOnce(&m.updates, src.uri)
		case !strings.ContainsAny(src.suite, "-/"):
			setOnce(&m.archive, src.uri)
		}
	}
	if m.archive == "" {
		return defaultMirrors()
	}
	return m
}

func setOnce(s *string, value string) {
	if *s == "" {
		*s = value
	}
}

// isDebian tells Debian's own archives from third-party ones: signed with
// Debian's keyring or, if no key is named, at a path as Debian's mirrors have.
func (s aptSource) isDebian() bool {
	if !slices.Contains(s.components, "main") {
		return false
	}
	u, err := url.Parse(s.uri)
	// A password in an address would end up in messages.
	if err != nil || (u.Scheme != "http" && u.Scheme != "https") || u.Host == "" || u.User != nil {
		return false
	}
	if strings.ContainsAny(s.uri, " \t\n'\"[]$`\\") {
		return false
	}
	if s.signedBy != "" {
		return strings.HasPrefix(s.signedBy, "/usr/share/keyrings/debian-archive-")
	}
	last := path.Base(u.Path)
	return last == "debian" || last == "debian-security"
}

// readSources reads sources.list and sources.list.d in apt's order. What cannot be
// read is left out: the default mirror stands in.
func readSources(etc fs.FS) []aptSource {
	files, _ := fs.Glob(etc, "sources.list.d/*")
	slices.Sort(files)
	var out []aptSource
	for _, name := range append([]string{"sources.list"}, files...) {
		info, err := fs.Stat(etc, name)
		if err != nil || !info.Mode().IsRegular() || info.Size() > maxSourceFile {
			continue
		}
		data, err := fs.ReadFile(etc, name)
		if err != nil {
			continue
		}
		switch path.Ext(name) {
		case ".list":
			out = append(out, parseList(string(data))...)
		case ".sources":
			out = append(out, parseDeb822(string(data))...)
		}
	}
	return out
}

// parseList reads the one-line format: deb [options] uri suite component...
func parseList(text string) []aptSource {
	var out []aptSource
	for line := range strings.Lines(text) {
		line, _, _ = strings.Cut(line, "#")
		rest, ok := strings.CutPrefix(strings.TrimSpace(line), "deb")
		if !ok || rest == "" || !strings.ContainsRune(" \t[", rune(rest[0])) {
			continue
		}
		rest = strings.TrimSpace(rest)
		var src aptSource
		if strings.HasPrefix(rest, "[") {
			options, after, found := strings.Cut(rest[1:], "]")
			if !found {
				continue
			}
			for option := range strings.FieldsSeq(options) {
				if key, ok := strings.CutPrefix(option, "signed-by="); ok {
					src.signedBy = key
				}
			}
			rest = after
		}
		fields := strings.Fields(rest)
		if len(fields) < 3 {
			continue
		}
		src.uri, src.suite, src.components = fields[0], fields[1], fields[2:]
		out = append(out, src)
	}
	return out
}

// parseDeb822 reads stanzas of "Key: values", each for all its addresses and suites.
func parseDeb822(text string) []aptSource {
	var out []aptSource
	stanza := map[string]string{}
	last := ""
	flush := func() {
		out = append(out, stanzaSources(stanza)...)
		stanza, last = map[string]string{}, ""
	}
	for line := range strings.Lines(text) {
		line = strings.TrimRight(line, "\r\n")
		switch {
		case strings.HasPrefix(line, "#"):
		case strings.TrimSpace(line) == "":
			flush()
		case line[0] == ' ' || line[0] == '\t':
			if last != "" {
				stanza[last] += " " + strings.TrimSpace(line)
			}
		default:
			if key, value, ok := strings.Cut(line, ":"); ok {
				last = strings.ToLower(strings.TrimSpace(key))
				stanza[last] = strings.TrimSpace(value)
			}
		}
	}
	flush()
	return out
}

func stanzaSources(stanza map[string]string) []aptSource {
	if !slices.Contains(strings.Fields(stanza["types"]), "deb") || strings.EqualFold(stanza["enabled"], "no") {
		return nil
	}
	var out []aptSource
	for uri := range strings.FieldsSeq(stanza["uris"]) {
		for suite := range strings.FieldsSeq(stanza["suites"]) {
			out = append(out, aptSource{
				uri: uri, suite: suite,
				components: strings.Fields(stanza["components"]), signedBy: strings.TrimSpace(stanza["signed-by"]),
			})
		}
	}
	return out
}
