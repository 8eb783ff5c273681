package buildnet

import (
	"errors"
	"net/netip"
	"testing"

	"forkd.dev/forkd/internal/errdefs"
)

func TestReachable(t *testing.T) {
	t.Parallel()
	own := []netip.Addr{netip.MustParseAddr("198.51.100.7")}
	for _, c := range []struct {
		ip                 string
		public, asRegistry bool
	}{
		{"93.184.215.14", true, true},
		{"2606:2800:21f:cb07::1", true, true},
		{"::ffff:93.184.215.14", true, true},
		{"10.0.0.1", false, true},
		{"172.16.9.9", false, true},
		{"192.168.1.1", false, true},
		{"100.64.0.1", false, true},
		{"127.0.0.1", false, true},
		{"127.9.9.9", false, true},
		{"::1", false, true},
		{"::ffff:127.0.0.1", false, true},
		{"::ffff:10.0.0.1", false, true},
		{"::127.0.0.1", false, true},
		{"64:ff9b::7f00:1", false, true},
		{"64:ff9b::5db8:d70e", true, true},
		{"64:ff9b:1::1", false, false},
		{"2002:7f00:1::", false, true},
		{"2002:a9fe:a9fe::", false, false},
		{"2001::1", false, false},
		{"fc00::1", false, true},
		{"fd12::1", false, true},
		{"fe80::1", false, true},
		{"fe80::1%eth0", false, false},
		{"169.254.1.1", false, true},
		{"198.18.0.1", false, true},
		{"198.51.100.7", false, true},
		{"169.254.169.254", false, false},
		{"::ffff:169.254.169.254", false, false},
		{"::ffff:a9fe:a9fe", false, false},
		{"64:ff9b::a9fe:a9fe", false, false},
		{"169.254.170.2", false, false},
		{"fd00:ec2::254", false, false},
		{"100.100.100.200", false, false},
		{"168.63.129.16", false, false},
		{"0.0.0.0", false, false},
		{"0.1.2.3", false, false},
		{"::", false, false},
		{"224.0.0.1", false, false},
		{"ff02::1", false, false},
		{"255.255.255.255", false, false},
		{"240.0.0.1", false, false},
	} {
		ip := netip.MustParseAddr(c.ip)
		if why := reachable(ip, false, own); (why == "") != c.public {
			t.Errorf("%s for anybody: %q", c.ip, why)
		}
		if why := reachable(ip, true, own); (why == "") != c.asRegistry {
			t.Errorf("%s for a registry: %q", c.ip, why)
		}
	}
	if reachable(netip.Addr{}, true, nil) == "" {
		t.Error("no address at all is reachable")
	}
}

func TestRules(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		rule, target string
		want         bool
	}{
		{"example.org", "example.org:443", true},
		{"example.org", "EXAMPLE.org.:80", true},
		{"example.org", "example.org:8443", false},
		{"example.org", "www.example.org:443", false},
		{"example.org", "example.org.evil.net:443", false},
		{"example.org:8443", "example.org:8443", true},
		{"example.org:8443", "example.org:443", false},
		{"*.example.org", "www.example.org:443", true},
		{"*.example.org", "a.b.example.org:443", true},
		{"*.example.org", "example.org:443", false},
		{"*.example.org", "evilexample.org:443", false},
		{"*.example.org", ".example.org:443", false},
		{"93.184.215.14", "93.184.215.14:443", true},
		{"93.184.215.14", "[::ffff:93.184.215.14]:443", true},
		{"example.org", "2130706433:443", false},
		{"example.org", "0x7f.1:443", false},
	} {
		r, err := parseRule(c.rule)
		if err != nil {
			t.Fatal(err)
		}
		to, ok := parseTarget(c.target, 443)
		if got := ok && r.covers(to); got != c.want {
			t.Errorf("%s covers %s: %v", c.rule, c.target, got)
		}
	}
}

func TestCheckAllow(t *testing.T) {
	t.Parallel()
	for _, bad := range []string{
		"", "*", "*.org", "*.", "a b", "http://example.org", "example.org/", "example.org:0", "example.org:99999", "user@example.org", "exa\nmple.org",
		"127.0.0.1", "10.1.2.3:80", "[::1]:443", "169.254.169.254", "*.10.0.0.1", "fe80::1%eth0", "..", "-", "a..b",
	} {
		if bad == "-" {
			continue // odd, but a name
		}
		if err := CheckAllow([]string{bad}); !errors.Is(err, errdefs.ErrInvalid) {
			t.Errorf("%q is allowed: %v", bad, err)
		}
	}
	if err := CheckAllow(make([]string, maxRules+1)); !errors.Is(err, errdefs.ErrInvalid) {
		t.Errorf("too many hosts: %v", err)
	}
	if err := CheckAllow([]string{"example.org", "*.example.org", "example.org:8080", "xn--bcher-kva.example", "8.8.8.8"}); err != nil {
		t.Error(err)
	}
}

func FuzzTarget(f *testing.F) {
	for _, s := range []string{"example.org:443", "[::1]:80", "a", ":", "[", "[::ffff:1.2.3.4%x]:1", "0x7f000001:80"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		to, ok := parseTarget(s, 443)
		if !ok {
			return
		}
		again, ok := parseTarget(to.String(), 0)
		if !ok || again != to {
			t.Errorf("%q is %v, and that is %v", s, to, again)
		}
		if _, err := parseRule(s); err != nil {
			return
		}
		if r, err := parseRule(s); err == nil && s[0] != '*' && !r.covers(to) && r.port != 0 && r.port != to.port {
			t.Errorf("rule %v of %q does not cover %v", r, s, to)
		}
	})
}
