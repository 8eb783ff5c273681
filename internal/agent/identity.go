package agent

import (
	"errors"
	"io/fs"
	"maps"
	"os"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"forkd.dev/forkd/internal/agentwire"
	"forkd.dev/forkd/internal/errdefs"
	"forkd.dev/forkd/internal/linux"
)

// Files of the agent that programs may read.
const (
	generationFile = "/run/forkd/generation"
	tokenFile      = "/run/forkd/token"
	bootIDFile     = "/run/forkd/boot_id"
	kernelBootID   = "/proc/sys/kernel/random/boot_id"
	coverDir       = "/run/forkd/cover"
	dbusMachineID  = "/var/lib/dbus/machine-id"
)

// identity is what tells this sandbox from its parent and siblings.
type identity struct {
	agent *Agent

	mu sync.Mutex
	// +checklocks:mu
	generation uint64
	// +checklocks:mu
	sandboxID string
	// +checklocks:mu
	env map[string]string
	// +checklocks:mu
	secrets map[string]string
}

func newIdentity(a *Agent) *identity {
	id := &identity{agent: a, env: map[string]string{}, secrets: map[string]string{}}
	if err := writeInPlace(a.path(generationFile), "0\n", 0o644); err != nil {
		a.cfg.Log("make generation file: " + err.Error())
	}
	if err := writeInPlace(a.path(tokenFile), "", 0o600); err != nil {
		a.cfg.Log("make token file: " + err.Error())
	}
	if err := id.coverBootID(); err != nil {
		a.cfg.Log("cover boot_id: " + err.Error())
	}
	for _, file := range identityFiles() {
		if err := id.cover(file); err != nil {
			a.cfg.Log("cover " + file + ": " + err.Error())
		}
	}
	return id
}

// identityFiles are the files of the root file system that differ in each fork.
func identityFiles() []string { return []string{"/etc/hostname", "/etc/hosts", "/etc/machine-id"} }

// cover lays a file in memory with the same content over one of the disk: giving a
// fork its identity then neither waits for the disk nor leaves marks on it. Like
// in a container, programs can write such a file but not replace it.
func (id *identity) cover(file string) error {
	if !id.agent.cfg.System {
		return nil
	}
	text, err := readLimited(file, 1<<20)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	if err != nil {
		if err := writeInPlace(file, "", 0o644); err != nil {
			return err
		}
	}
	over := coverDir + file
	if err := writeInPlace(over, string(text), 0o644); err != nil {
		return err
	}
	return unix.Mount(over, file, "", unix.MS_BIND, "")
}

// coverBootID puts a file of ours over the kernel's boot_id, which no fork can
// change, so that a fork only has to write that file.
func (id *identity) coverBootID() error {
	text, err := os.ReadFile(kernelBootID)
	if err != nil {
		return err
	}
	file := id.agent.path(bootIDFile)
	if err := writeInPlace(file, string(text), 0o444); err != nil || !id.agent.cfg.System {
		return err
	}
	return unix.Mount(file, kernelBootID, "", unix.MS_BIND, "")
}

func (id *identity) now() time.Time { return time.Now() }

func (id *identity) generationNow() uint64 {
	id.mu.Lock()
	defer id.mu.Unlock()
	return id.generation
}

// boot takes the settings of a freshly booted machine.
func (id *identity) boot(m agentwire.BootConfig) error {
	for k, v := range m.Env {
		if err := checkEnv(k, v); err != nil {
			return err
		}
	}
	if len(m.Entropy) > 0 {
		if err := id.seed(m.Entropy); err != nil {
			return err
		}
	}
	if err := id.setClock(m.HostTime); err != nil {
		return err
	}
	if m.Hostname != "" {
		if err := id.setHostname(m.Hostname); err != nil {
			return err
		}
	}
	id.mu.Lock()
	defer id.mu.Unlock()
	maps.Copy(id.env, m.Env)
	return nil
}

// environ returns a fresh copy of the environment of programs run as who.
func (id *identity) environ(who account) map[string]string {
	id.mu.Lock()
	defer id.mu.Unlock()
	env := map[string]string{
		"PATH": defaultPath, "LANG": "C.UTF-8", "HOME": who.home, "USER": who.name, "LOGNAME": who.name,
	}
	maps.Copy(env, id.env)
	maps.Copy(env, id.secrets)
	return env
}

// seed makes the kernel's random generator differ from that of any other machine.
func (id *identity) seed(entropy []byte) error {
	if !id.agent.cfg.System {
		return nil
	}
	return linux.SeedRandom(entropy)
}

// setClock sets the wall clock, unless t is zero.
func (id *identity) setClock(t time.Time) error {
	if t.IsZero() || !id.agent.cfg.System {
		return nil
	}
	ts := unix.NsecToTimespec(t.UnixNano())
	if err := unix.ClockSettime(unix.CLOCK_REALTIME, &ts); err != nil {
		return errdefs.New(errdefs.ErrInternal, "set wall clock: %w", err)
	}
	return nil
}

// setHostname sets the host name, /etc/hostname and the line of 127.0.1.1 in /etc/hosts.
func (id *identity) setHostname(name string) error {
	if err := checkHostname(name); err != nil {
		return err
	}
	if id.agent.cfg.System {
		if err := unix.Sethostname([]byte(name)); err != nil {
			return errdefs.New(errdefs.ErrInternal, "set hostname: %w", err)
		}
	}
	if err := writeInPlace(id.agent.path("/etc/hostname"), name+"\n", 0o644); err != nil {
		return errdefs.New(errdefs.ErrInternal, "write hostname: %w", err)
	}
	hosts := id.agent.path("/etc/hosts")
	text, err := readLimited(hosts, 1<<20)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return errdefs.New(errdefs.ErrInternal, "read hosts: %w", err)
	}
	if err := writeInPlace(hosts, hostsWith(string(text), name), 0o644); err != nil {
		return errdefs.New(errdefs.ErrInternal, "write hosts: %w", err)
	}
	return nil
}

func hostsWith(text, name string) string {
	var out strings.Builder
	if text == "" {
		text = "127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\n"
	}
	for line := range strings.Lines(text) {
		if f := strings.Fields(line); len(f) > 0 && f[0] == "127.0.1.1" {
			continue
		}
		out.WriteString(strings.TrimSuffix(line, "\n") + "\n")
	}
	return out.String() + "127.0.1.1\t" + name + "\n"
}

func checkHostname(name string) error {
	bad := name == "" || len(name) > 64 || name[0] == '-' || name[0] == '.'
	for _, r := range name {
		if !(r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' || r >= '0' && r <= '9' || r == '-' || r == '.') {
			bad = true
		}
	}
	if bad {
		return errdefs.New(errdefs.ErrInvalid, "hostname %.80q is not 1 to 64 letters, digits, '-' and '.'", name)
	}
	return nil
}

// setMachineID writes the machine id where programs look for it.
func (id *identity) setMachineID(value string) error {
	if err := writeInPlace(id.agent.path("/etc/machine-id"), value+"\n", 0o444); err != nil {
		return err
	}
	// D-Bus keeps a copy if it is not a link to the first.
	dbus := id.agent.path(dbusMachineID)
	if unix.Access(dbus, unix.F_OK) != nil {
		return nil
	}
	if info, err := os.Lstat(dbus); err == nil && info.Mode().IsRegular() {
		return writeInPlace(dbus, value+"\n", 0o444)
	}
	return nil
}

func (id *identity) setToken(token string) error {
	return writeInPlace(id.agent.path(tokenFile), token+"\n", 0o600)
}

// setGeneration writes the generation on the file's old inode, where programs
// have it mapped or watched.
func (id *identity) setGeneration(n uint64) error {
	if err := writeInPlace(id.agent.path(generationFile), strconv.FormatUint(n, 10)+"\n", 0o644); err != nil {
		return err
	}
	id.mu.Lock()
	defer id.mu.Unlock()
	id.generation = n
	return nil
}

// setEnv adds the environment of a fork; secrets of the parent end here. It
// returns the changes for a running interpreter: "K=V" to set, "K" to remove.
func (id *identity) setEnv(m agentwire.Identity) (changes []string) {
	id.mu.Lock()
	defer id.mu.Unlock()
	for k := range id.secrets {
		if _, kept := m.Secrets[k]; !kept {
			if v, plain := id.env[k]; plain {
				changes = append(changes, k+"="+v)
			} else {
				changes = append(changes, k)
			}
		}
	}
	maps.Copy(id.env, m.Env)
	id.secrets = maps.Clone(m.Secrets)
	id.sandboxID = m.SandboxID
	for _, set := range []map[string]string{m.Env, m.Secrets} {
		for k, v := range set {
			changes = append(changes, k+"="+v)
		}
	}
	return changes
}

// checkIdentity refuses an identity that could not be applied as a whole.
func checkIdentity(m agentwire.Identity, generation uint64) error {
	invalid := func(what string) error {
		return errdefs.New(errdefs.ErrInvalid, "identity: %s", what)
	}
	switch {
	case len(m.Entropy) < 32 || len(m.Entropy) > 1024:
		return invalid("entropy is not 32 to 1024 bytes")
	case !isHex(m.MachineID, 32):
		return invalid("machine id is not 32 lower-case hex digits")
	case m.Reseed != "" && m.Reseed != agentwire.ReseedAll && m.Reseed != agentwire.ReseedSystem:
		return invalid("unknown reseed mode")
	case m.Generation <= generation:
		return invalid("generation does not grow")
	case m.HostTime.IsZero():
		return invalid("no host time")
	case strings.ContainsAny(m.Token+m.SandboxID, "\n\x00"):
		return invalid("token or sandbox id with a line end")
	case len(m.BootID) != 36 || !isHex(strings.ReplaceAll(m.BootID, "-", ""), 32):
		return invalid("boot id is not of RFC 4122 form")
	}
	for _, set := range []map[string]string{m.Env, m.Secrets} {
		for k, v := range set {
			if err := checkEnv(k, v); err != nil {
				return err
			}
		}
	}
	return checkHostname(m.Hostname)
}

func isHex(s string, n int) bool {
	return len(s) == n && strings.Trim(s, "0123456789abcdef") == ""
}
