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
	forkFile       = "/run/forkd/fork.json"
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

	// What look found. It belongs to who has the turn of a capture.
	hostname, hosts, machineID, bootID, token, generations, fork heldFile

	hostsHead string // of /etc/hosts without our line
	dbus      bool   // D-Bus has a machine id of its own
	random    *linux.RandomPool
}

func newIdentity(a *Agent) *identity {
	held := func(path string, mode os.FileMode) heldFile { return heldFile{path: a.path(path), mode: mode, fd: -1} }
	id := &identity{
		agent: a, env: map[string]string{}, secrets: map[string]string{},
		hostname: held("/etc/hostname", 0o644), hosts: held("/etc/hosts", 0o644), machineID: held("/etc/machine-id", 0o444),
		bootID: held(bootIDFile, 0o444), token: held(tokenFile, 0o600), generations: held(generationFile, 0o644),
		fork: held(forkFile, 0o644),
	}
	if err := writeInPlace(a.path(generationFile), "0\n", 0o644); err != nil {
		a.cfg.Log("make generation file: " + err.Error())
	}
	if err := writeInPlace(a.path(tokenFile), "", 0o600); err != nil {
		a.cfg.Log("make token file: " + err.Error())
	}
	if err := writeInPlace(a.path(forkFile), "", 0o644); err != nil {
		a.cfg.Log("make fork file: " + err.Error())
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

// look finds out what giving this machine an identity will need. It holds for as
// long as user processes stay frozen.
func (id *identity) look() {
	for _, h := range []*heldFile{&id.hostname, &id.hosts, &id.machineID, &id.bootID, &id.token, &id.generations, &id.fork} {
		h.look()
	}
	text, _ := readLimited(id.hosts.path, maxHosts)
	id.hostsHead = hostsWithout(string(text))
	// D-Bus keeps a copy of the machine id if it is not a link to the first.
	info, err := os.Lstat(id.agent.path(dbusMachineID))
	id.dbus = err == nil && info.Mode().IsRegular()
	if id.random == nil && id.ownKernel() {
		pool, err := linux.OpenRandomPool()
		if err != nil {
			id.agent.cfg.Log(err.Error())
		}
		id.random = pool
	}
}

const maxHosts = 1 << 20

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
	id.agent.capture.turn.Lock()
	defer id.agent.capture.turn.Unlock()
	id.look()
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
	if !id.ownKernel() {
		return nil
	}
	if id.random == nil {
		return errdefs.New(errdefs.ErrInternal, "seed random pool: it could not be opened")
	}
	return id.random.Seed(entropy)
}

// ownKernel tells whether time and randomness of this kernel are ours to set.
func (id *identity) ownKernel() bool { return id.agent.cfg.System && !id.agent.cfg.UserKernel }

// setClock sets the wall clock, unless t is zero.
func (id *identity) setClock(t time.Time) error {
	if t.IsZero() || !id.ownKernel() {
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
	if err := id.hostname.write(name + "\n"); err != nil {
		return errdefs.New(errdefs.ErrInternal, "write hostname: %w", err)
	}
	if err := id.hosts.write(id.hostsHead + "127.0.1.1\t" + name + "\n"); err != nil {
		return errdefs.New(errdefs.ErrInternal, "write hosts: %w", err)
	}
	return nil
}

// hostsWithout returns the lines of a hosts file except the one of our own name.
func hostsWithout(text string) string {
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
	return out.String()
}

func checkHostname(name string) error {
	bad := name == "" || len(name) > 64 || name[0] == '-' || name[0] == '.'
	for _, r := range name {
		fine := r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' || r >= '0' && r <= '9' || r == '-' || r == '.'
		bad = bad || !fine
	}
	if bad {
		return errdefs.New(errdefs.ErrInvalid, "hostname %.80q is not 1 to 64 letters, digits, '-' and '.'", name)
	}
	return nil
}

// setMachineID writes the machine id where programs look for it.
func (id *identity) setMachineID(value string) error {
	if err := id.machineID.write(value + "\n"); err != nil || !id.dbus {
		return err
	}
	return writeInPlace(id.agent.path(dbusMachineID), value+"\n", 0o444)
}

func (id *identity) setToken(token string) error { return id.token.write(token + "\n") }

// setGeneration writes the generation on the file's old inode, where programs
// have it mapped or watched.
func (id *identity) setGeneration(n uint64) error {
	if err := id.generations.write(strconv.FormatUint(n, 10) + "\n"); err != nil {
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
	case m.Reseed != "" && m.Reseed != agentwire.ReseedAll && m.Reseed != agentwire.ReseedSystem && m.Reseed != agentwire.ReseedSeed:
		return invalid("unknown reseed mode")
	case m.Reseed == agentwire.ReseedSeed && len(m.RunnerSeed) != seedSize:
		return invalid("seed is not 64 bytes")
	case m.Generation <= generation:
		return invalid("generation does not grow")
	case m.HostTime.IsZero():
		return invalid("no host time")
	case m.Keep:
		return nil
	case !isHex(m.MachineID, 32):
		return invalid("machine id is not 32 lower-case hex digits")
	case hasLineEnd(m.Token) || hasLineEnd(m.SandboxID):
		return invalid("token or sandbox id with a line end")
	case !isBootID(m.BootID):
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

// The checks are plain loops: in a fork, a general function costs more than it saves.

func hasLineEnd(s string) bool {
	for i := range len(s) {
		if s[i] == '\n' || s[i] == 0 {
			return true
		}
	}
	return false
}

func isHex(s string, n int) bool {
	for i := range len(s) {
		if c := s[i]; (c < '0' || c > '9') && (c < 'a' || c > 'f') {
			return false
		}
	}
	return len(s) == n
}

// isBootID tells whether s has the form 8-4-4-4-12.
func isBootID(s string) bool {
	const digits = 32
	hex := make([]byte, 0, digits)
	for i := range len(s) {
		if s[i] != '-' {
			if len(hex) == digits {
				return false
			}
			hex = append(hex, s[i])
		}
	}
	return len(s) == digits+4 && isHex(string(hex), digits)
}
