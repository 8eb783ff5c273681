package buildnet

import (
	"context"
	"net"
	"net/http"
	"net/netip"
	"sort"
	"strings"
	"sync"
	"time"

	"forkd.dev/forkd/internal/errdefs"
)

// Config is what a network is made of.
type Config struct {
	Settings Settings
	Allow    []string // HOST[:PORT] of the request, besides the host's registries
	// Log is told the end of each connection; it may be nil. Calls may be concurrent.
	Log func(Connection)

	// Resolve and Dial replace those of the system.
	Resolve func(ctx context.Context, host string) ([]netip.Addr, error)
	Dial    func(ctx context.Context, a netip.AddrPort) (net.Conn, error)
}

// Connection is what became of one connection or request.
type Connection struct {
	Host     string // host:port as asked for
	Refused  string // why it was not allowed, or ""
	Failed   string // why it did not succeed, or ""
	Sent     int64  // bytes from the guest
	Received int64  // bytes to the guest
	Duration time.Duration
}

// Network serves one build.
type Network struct {
	settings Settings
	rules    []rule
	log      func(Connection)
	own      []netip.Addr
	resolver func(ctx context.Context, host string) ([]netip.Addr, error)
	dialer   func(ctx context.Context, a netip.AddrPort) (net.Conn, error)
	plain    *http.Transport // for requests that are not tunnels
	handlers sync.WaitGroup

	mu sync.Mutex
	// +checklocks:mu
	over bool // Serve has ended
	// +checklocks:mu
	total Totals
	// +checklocks:mu
	refused map[string]string // host:port -> why
}

// Totals is what a network has carried so far.
type Totals struct {
	Connections int
	Open        int
	Sent        int64
	Received    int64
}

// New checks what the request wants to allow and returns its network.
func New(cfg Config) (*Network, error) {
	if err := CheckAllow(cfg.Allow); err != nil {
		return nil, err
	}
	n := &Network{
		settings: cfg.Settings, log: cfg.Log, own: ownAddresses(), resolver: cfg.Resolve, dialer: cfg.Dial,
		refused: map[string]string{}, rules: append([]rule(nil), cfg.Settings.registries...),
	}
	if n.log == nil {
		n.log = func(Connection) {}
	}
	if n.resolver == nil {
		n.resolver = systemResolve
	}
	if n.dialer == nil {
		n.dialer = systemDial
	}
	for _, text := range cfg.Allow {
		r, err := parseRule(text)
		if err != nil {
			return nil, err
		}
		n.rules = append(n.rules, r)
	}
	n.plain = n.newTransport()
	return n, nil
}

// Allowed lists the rules in words.
func (n *Network) Allowed() []string {
	var out []string
	for _, r := range n.rules {
		out = append(out, r.String())
	}
	return out
}

// Refused says, for each host that was refused, why, in order of the names.
func (n *Network) Refused() []string {
	n.mu.Lock()
	defer n.mu.Unlock()
	var out []string
	for _, why := range n.refused {
		out = append(out, why)
	}
	sort.Strings(out)
	return out
}

// Totals returns what was carried so far.
func (n *Network) Totals() Totals {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.total
}

// maxRefused bounds the refused hosts that are remembered.
const maxRefused = 100

// refuse takes note of a refusal and answers it, in this order: who has the answer
// finds the note.
func (n *Network) refuse(w http.ResponseWriter, status int, c *Connection, why string) {
	c.Refused = why
	n.mu.Lock()
	if len(n.refused) < maxRefused {
		n.refused[c.Host] = why
	}
	n.mu.Unlock()
	deny(w, status, why)
}

// ended takes note of a connection.
func (n *Network) ended(c Connection) { n.log(c) }

func (n *Network) count(connections, open int, sent, received int64) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.total.Connections += connections
	n.total.Open += open
	n.total.Sent += sent
	n.total.Received += received
}

// shown is a name of the guest as it may stand in a log.
func shown(s string) string {
	const most = 120
	if len(s) > most {
		s = s[:most] + "..."
	}
	return strings.Map(func(r rune) rune {
		if r <= ' ' || r >= 0x7f {
			return '?'
		}
		return r
	}, s)
}

func errClosed() error { return errdefs.New(errdefs.ErrCanceled, "the build has ended") }
