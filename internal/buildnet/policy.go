package buildnet

import (
	"net"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"forkd.dev/forkd/internal/errdefs"
)

// target is a host and port that somebody wants to reach. The host is in lower
// case, without the final dot.
type target struct {
	host string
	port int
}

func (t target) String() string { return net.JoinHostPort(t.host, strconv.Itoa(t.port)) }

// rule allows hosts.
type rule struct {
	host     string // exact, or the suffix ".example.org" of "*.example.org"
	port     int    // 0 means 80 and 443
	registry bool   // the host itself is configured for it
}

func (r rule) covers(t target) bool {
	if r.port == 0 && t.port != 80 && t.port != 443 || r.port != 0 && r.port != t.port {
		return false
	}
	if strings.HasPrefix(r.host, ".") {
		return strings.HasSuffix(t.host, r.host) && len(t.host) > len(r.host)
	}
	return r.host == t.host
}

// String is how a user writes the rule.
func (r rule) String() string {
	host := r.host
	if strings.HasPrefix(host, ".") {
		host = "*" + host
	}
	if r.port == 0 {
		return host
	}
	return net.JoinHostPort(host, strconv.Itoa(r.port))
}

const (
	maxRules = 200
	maxHost  = 253
)

// CheckAllow tells what is wrong with hosts that a request wants to allow.
func CheckAllow(list []string) error {
	if len(list) > maxRules {
		return errdefs.New(errdefs.ErrInvalid, "%d hosts to allow, at most %d are possible", len(list), maxRules)
	}
	for _, text := range list {
		if _, err := parseRule(text); err != nil {
			return err
		}
	}
	return nil
}

// parseRule reads HOST[:PORT], where HOST is a name, *.SUFFIX or an IP address.
func parseRule(text string) (rule, error) {
	bad := func(why string) (rule, error) {
		return rule{}, errdefs.WithHint(errdefs.New(errdefs.ErrInvalid, "allow host %.80q: %s", text, why),
			"write HOST, HOST:PORT or *.SUFFIX, for example files.example.org")
	}
	host, port := text, 0
	if h, p, err := net.SplitHostPort(text); err == nil {
		n, err := strconv.ParseUint(p, 10, 16)
		if err != nil || n == 0 {
			return bad("the port is no number from 1 to 65535")
		}
		host, port = h, int(n)
	}
	suffix, wild := strings.CutPrefix(host, "*.")
	name, ok := hostName(suffix)
	if !ok {
		return bad("it is not the name of a host")
	}
	ip, err := netip.ParseAddr(name)
	switch {
	case err == nil && wild:
		return bad("an address has no subdomains")
	case err == nil:
		if why := reachable(ip, false, nil); why != "" {
			return bad("it is " + why)
		}
	case wild && !strings.Contains(name, "."):
		return bad("that would allow a whole top-level domain")
	}
	if wild {
		name = "." + name
	}
	return rule{host: name, port: port}, nil
}

// hostName returns the one form of a host that rules are compared in.
func hostName(s string) (string, bool) {
	s = strings.TrimSuffix(strings.ToLower(s), ".")
	if inner, ok := strings.CutPrefix(s, "["); ok {
		s = strings.TrimSuffix(inner, "]")
	}
	if s == "" || len(s) > maxHost {
		return "", false
	}
	if ip, err := netip.ParseAddr(s); err == nil {
		return ip.Unmap().String(), ip.Zone() == ""
	}
	for label := range strings.SplitSeq(s, ".") {
		if label == "" || len(label) > 63 {
			return "", false
		}
		for _, c := range []byte(label) {
			if (c < 'a' || c > 'z') && (c < '0' || c > '9') && c != '-' && c != '_' {
				return "", false
			}
		}
	}
	return s, true
}

// parseTarget reads the host:port of a request; port is the default.
func parseTarget(text string, port int) (target, bool) {
	host := text
	if h, p, err := net.SplitHostPort(text); err == nil {
		n, err := strconv.ParseUint(p, 10, 16)
		if err != nil || n == 0 {
			return target{}, false
		}
		host, port = h, int(n)
	}
	name, ok := hostName(host)
	return target{host: name, port: port}, ok && port != 0
}

// find returns the rule that allows t. A registry's comes first: it also tells
// which addresses are fine.
func find(rules []rule, t target) (rule, bool) {
	for _, registry := range []bool{true, false} {
		i := slices.IndexFunc(rules, func(r rule) bool { return r.registry == registry && r.covers(t) })
		if i >= 0 {
			return rules[i], true
		}
	}
	return rule{}, false
}
