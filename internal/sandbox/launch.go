package sandbox

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"strings"
	"time"

	"forkd.dev/forkd/internal/agentwire"
	"forkd.dev/forkd/internal/store/metadata"
)

// insert journals the children of b as creating.
func (b *batch) insert(ctx context.Context) error {
	rows := make([]metadata.Sandbox, 0, len(b.children))
	for _, c := range b.children {
		row, err := b.s.toRow(c.info)
		if err != nil {
			return err
		}
		rows = append(rows, row)
	}
	return b.s.cfg.Journal.InsertSandboxes(ctx, rows)
}

// launch makes one child run with its own identity. On error nothing is left of it.
func (b *batch) launch(ctx context.Context, c *child) (Sandbox, error) {
	e, err := b.start(ctx, c)
	if err != nil {
		if e != nil {
			e.link.close()
		}
		err = errors.Join(err, b.s.discard(c.info.ID))
		return Sandbox{}, errors.Join(err, b.s.cfg.Journal.DeleteSandboxes(context.WithoutCancel(ctx), c.info.ID))
	}
	return e.snapshot(), nil
}

// start restores, resumes and identifies c. The entry is returned also on error,
// once there is a machine.
func (b *batch) start(ctx context.Context, c *child) (*entry, error) {
	s := b.s
	if err := s.restores.Acquire(ctx, 1); err != nil {
		return nil, err
	}
	defer s.restores.Release(1)
	if err := b.restore(ctx, c); err != nil {
		return nil, err
	}
	if c.link == nil {
		c.link = newLink(c.machine, s.cfg.Connect, b.patience())
	}
	e := &entry{machine: c.machine, link: c.link}
	c.info.Timing.Start = time.Since(b.began)
	receipt, err := b.identify(ctx, e, c)
	if err != nil {
		return e, err
	}
	c.info.State, c.info.Receipt, c.info.PID = Running, &receipt, c.machine.PID()
	c.info.Timing.Total = time.Since(b.began)
	e.info = c.info
	e.release = b.plan.lease(c.info.ID)
	if err := s.journal(ctx, c.info); err != nil {
		e.release()
		return e, err
	}
	s.register(e)
	b.room.take()
	return e, nil
}

// restore gives c a machine, unless it claimed one.
func (b *batch) restore(ctx context.Context, c *child) error {
	if c.machine != nil {
		if err := b.limit(ctx, c); err != nil || c.machine != nil {
			return err
		}
	}
	spec, err := b.s.newSpec(c.info.ID, b.plan.manifest.Shape, b.plan.root, 0)
	if err != nil {
		return err
	}
	spec.Limits = b.req.limits()
	if b.req.Cold {
		c.machine, err = b.bootFrom(ctx, spec)
		return err
	}
	c.machine, err = b.s.cfg.Engine.Restore(ctx, spec, b.plan.chain)
	return err
}

// identify lets the machine run and has the agent fulfil the fork contract.
func (b *batch) identify(ctx context.Context, e *entry, c *child) (agentwire.Receipt, error) {
	ctx, cancel := context.WithTimeout(ctx, b.patience())
	defer cancel()
	if err := c.machine.Resume(ctx); err != nil {
		return agentwire.Receipt{}, err
	}
	agent, err := e.link.get(ctx)
	if err != nil {
		return agentwire.Receipt{}, err
	}
	if b.req.Cold {
		if err := configure(ctx, agent); err != nil {
			return agentwire.Receipt{}, fmt.Errorf("boot sandbox %s: %w", c.info.ID, err)
		}
	}
	c.info.Timing.Hello = time.Since(b.began)
	id, err := b.identityOf(c)
	if err != nil {
		return agentwire.Receipt{}, err
	}
	if err := b.giveFiles(ctx, agent, c); err != nil {
		return agentwire.Receipt{}, fmt.Errorf("give sandbox %s its files: %w", c.info.ID, err)
	}
	id.HostTime = time.Now()
	receipt, err := agent.VerdictFork(ctx, id)
	if err != nil {
		return receipt, fmt.Errorf("give sandbox %s its identity: %w", c.info.ID, err)
	}
	c.info.Timing.Identity = time.Since(b.began)
	if b.req.Cold {
		return receipt, b.booted(ctx, agent, &receipt)
	}
	return receipt, nil
}

// hostnameOf is the name of a sandbox as a host name may be spelled (RFC 1123).
func hostnameOf(info Sandbox) string {
	name := strings.Trim(strings.ReplaceAll(info.Name, "_", "-"), "-.")
	if name == "" {
		return info.ID
	}
	return name
}

// newIdentity draws everything that makes one fork differ from all others.
func newIdentity(id, hostname string, env map[string]string) agentwire.Identity {
	entropy := make([]byte, 64)
	rand.Read(entropy) // never fails since Go 1.24
	now := time.Now()
	return agentwire.Identity{
		SandboxID: id,
		Hostname:  hostname,
		MachineID: randomHex(16),
		BootID:    randomUUID(),
		Token:     randomHex(32),
		Entropy:   entropy,
		Reseed:    agentwire.ReseedAll,
		Env:       env,
		// Microseconds since 1970 only grow and fit a float64 exactly.
		Generation: uint64(now.UnixMicro()),
		HostTime:   now,
	}
}

func randomHex(n int) string {
	b := make([]byte, n)
	rand.Read(b)
	return hex.EncodeToString(b)
}

// randomUUID returns a version 4 UUID (RFC 9562), the form of a kernel's boot id.
func randomUUID() string {
	var b [16]byte
	rand.Read(b[:])
	b[6] = b[6]&0x0f | 0x40
	b[8] = b[8]&0x3f | 0x80
	return fmt.Sprintf("%x-%x-%x-%x-%x", b[:4], b[4:6], b[6:8], b[8:10], b[10:])
}
