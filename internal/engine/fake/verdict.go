package fake

import (
	"context"
	"encoding/hex"
	"maps"
	"time"

	"forkd.dev/forkd/internal/agentwire"
	"forkd.dev/forkd/internal/errdefs"
)

// forkFile is where a guest reads its place in the fork call.
const forkFile = "/run/forkd/fork.json"

// Prepare freezes the user processes of the guest.
func (a *Agent) Prepare(ctx context.Context, _ agentwire.Prepare) error {
	return a.call(ctx, "prepare", anytime, func(c *content) error {
		if c.Device.Frozen {
			return errdefs.New(errdefs.ErrConflict, "agent prepare: a capture is already prepared")
		}
		c.Device.Frozen = true
		return nil
	})
}

// Commit is the last call before the stop.
func (a *Agent) Commit(ctx context.Context) error {
	return a.call(ctx, "commit", anytime, func(c *content) error {
		if !c.Device.Frozen || c.Device.Committed {
			return errdefs.New(errdefs.ErrConflict, "agent commit: no capture is prepared")
		}
		c.Device.Committed = true
		return nil
	})
}

// VerdictSource tells the guest that it is the source of a capture.
func (a *Agent) VerdictSource(ctx context.Context) error {
	return a.call(ctx, "verdict", anytime, func(c *content) error {
		c.Device.Frozen, c.Device.Committed, c.Device.offset = false, false, 0
		return nil
	})
}

// VerdictFork gives the guest an identity of its own, frozen or not.
func (a *Agent) VerdictFork(ctx context.Context, id agentwire.Identity) (receipt agentwire.Receipt, err error) {
	err = a.call(ctx, "verdict", anytime, func(c *content) error {
		if id.Generation <= c.Device.Gen {
			return errdefs.New(errdefs.ErrInvalid, "agent verdict: generation %d after %d", id.Generation, c.Device.Gen)
		}
		c.Device.Frozen, c.Device.Committed, c.Device.offset = false, false, time.Until(id.HostTime)
		c.Device.Gen = id.Generation
		if !id.Keep {
			c.Device.SandboxID, c.Device.Hostname = id.SandboxID, id.Hostname
			c.Device.Secrets = maps.Clone(id.Secrets)
			if c.Device.Env == nil {
				c.Device.Env = map[string]string{}
			}
			maps.Copy(c.Device.Env, id.Env)
			c.Disk[forkFile] = string(id.Fork)
		}
		switch id.Reseed {
		case agentwire.ReseedSystem:
		case agentwire.ReseedSeed:
			c.Device.Seed = hex.EncodeToString(id.RunnerSeed)
		default:
			c.Device.Seed = hex.EncodeToString(id.Entropy)
		}
		receipt = agentwire.Receipt{Generation: id.Generation}
		for _, name := range []string{"kernel_csprng", "wall_clock", "hostname", "machine_id", "boot_id", "token", "generation_file", "thaw"} {
			receipt.Steps = append(receipt.Steps, agentwire.ReceiptStep{Name: name, Status: "done"})
		}
		return nil
	})
	return receipt, err
}
