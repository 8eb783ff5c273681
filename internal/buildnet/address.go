package buildnet

import (
	"net"
	"net/netip"
)

// reachable says why nobody may connect to an address, or "". Registries of the
// host may be in private networks, but never at a metadata service.
func reachable(ip netip.Addr, registry bool, own []netip.Addr) string {
	ip, ok := plain(ip)
	switch {
	case !ok:
		return "not a unicast address"
	case isMetadata(ip):
		return "the address of a metadata service"
	case ip.IsUnspecified() || ip.IsMulticast() || inAny(ip, never()):
		return "not a unicast address"
	case registry:
		return ""
	case ip.IsLoopback():
		return "a loopback address"
	case ip.IsLinkLocalUnicast():
		return "a link-local address"
	case ip.IsPrivate() || inAny(ip, private()):
		return "a private address"
	case contains(own, ip):
		return "an address of this host"
	}
	return ""
}

// plain returns the address that packets to ip arrive at: transition formats of
// IPv6 carry an IPv4 address. It refuses those that hide more than that.
func plain(ip netip.Addr) (netip.Addr, bool) {
	if !ip.IsValid() || ip.Zone() != "" {
		return ip, false
	}
	ip = ip.Unmap()
	if ip.Is4() {
		return ip, true
	}
	b := ip.As16()
	v4 := func(at int) netip.Addr { return netip.AddrFrom4([4]byte(b[at : at+4])) }
	switch {
	case netip.MustParsePrefix("64:ff9b::/96").Contains(ip): // NAT64
		return v4(12), true
	case netip.MustParsePrefix("2002::/16").Contains(ip): // 6to4
		return v4(2), true
	case netip.MustParsePrefix("64:ff9b:1::/48").Contains(ip), // local-use NAT64
		netip.MustParsePrefix("2001::/32").Contains(ip): // Teredo
		return ip, false
	case netip.MustParsePrefix("::/96").Contains(ip) && !ip.IsLoopback() && !ip.IsUnspecified(): // IPv4-compatible
		return v4(12), true
	}
	return ip, true
}

// isMetadata tells the addresses at which clouds hand out credentials.
func isMetadata(ip netip.Addr) bool {
	switch ip.String() {
	case "169.254.169.254", "169.254.170.2", "169.254.170.23", "fd00:ec2::254", "fd00:ec2::23", "fd20:ce::254",
		"100.100.100.200", "168.63.129.16", "192.0.0.192":
		return true
	}
	return false
}

func never() []string {
	return []string{"0.0.0.0/8", "240.0.0.0/4", "100::/64"}
}

func private() []string {
	return []string{"100.64.0.0/10", "192.0.0.0/24", "198.18.0.0/15", "fec0::/10", "2001:2::/48"}
}

func inAny(ip netip.Addr, prefixes []string) bool {
	for _, p := range prefixes {
		if netip.MustParsePrefix(p).Contains(ip) {
			return true
		}
	}
	return false
}

func contains(list []netip.Addr, ip netip.Addr) bool {
	for _, a := range list {
		if a.Unmap() == ip {
			return true
		}
	}
	return false
}

// ownAddresses lists the addresses of this host: what listens only to neighbours
// listens there too.
func ownAddresses() []netip.Addr {
	addrs, err := net.InterfaceAddrs()
	if err != nil {
		return nil // loopback and private ones are known without it
	}
	var out []netip.Addr
	for _, a := range addrs {
		if p, err := netip.ParsePrefix(a.String()); err == nil {
			out = append(out, p.Addr().Unmap())
		}
	}
	return out
}
