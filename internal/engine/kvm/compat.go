package kvm

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"io"
	"os"

	"forkd.dev/forkd/internal/engine"
	"forkd.dev/forkd/internal/errdefs"
)

const accelerator = "kvm"

// Compat describes what state captured here needs.
func (d *Driver) Compat(root engine.Root) (engine.Compat, error) {
	digest, err := kernelDigest(root.Kernel)
	if err != nil {
		return engine.Compat{}, err
	}
	return engine.Compat{Engine: Name, EngineBuild: d.stateBuild(), Accelerator: accelerator, KernelDigest: digest, TSCkHz: d.tscKHz}, nil
}

// stateBuild is what must agree between who captures and who restores: the format of the
// state, not the build of the monitor.
func (d *Driver) stateBuild() string { return formatState }

// maxTSCDeviationPPM is how far the host's TSC rate may be from the recorded one.
const maxTSCDeviationPPM = 500

// CheckCompat says why state recorded as c cannot be restored here. Processor features are
// compared by the monitor when it loads the state.
func (d *Driver) CheckCompat(c engine.Compat) error {
	switch {
	case c.Engine != Name:
		return errdefs.New(errdefs.ErrIncompatible, "it was captured by engine %q, this is %q", c.Engine, Name)
	case c.EngineBuild != d.stateBuild():
		return errdefs.WithHint(errdefs.New(errdefs.ErrIncompatible, "its state has format %s, this forkd reads %s", c.EngineBuild, d.stateBuild()),
			"make the snapshot again on this host")
	case c.Accelerator != accelerator:
		return errdefs.New(errdefs.ErrIncompatible, "it was captured with accelerator %q, this engine uses %s", c.Accelerator, accelerator)
	}
	diff := int64(c.TSCkHz) - int64(d.tscKHz)
	if diff < 0 {
		diff = -diff
	}
	if diff*1_000_000 > int64(d.tscKHz)*maxTSCDeviationPPM {
		return errdefs.WithHint(errdefs.New(errdefs.ErrIncompatible, "it was captured at a TSC rate of %d kHz, this host has %d kHz", c.TSCkHz, d.tscKHz),
			"make the snapshot again on this host")
	}
	return nil
}

// kernelDigest identifies a guest kernel. It is read once per capture, not per fork.
func kernelDigest(path string) (string, error) {
	f, err := os.Open(path)
	if err != nil {
		return "", fmt.Errorf("digest kernel: %w", err)
	}
	defer f.Close()
	h := sha256.New()
	if _, err := io.Copy(h, f); err != nil {
		return "", fmt.Errorf("digest kernel %s: %w", path, err)
	}
	return "sha256:" + hex.EncodeToString(h.Sum(nil)), nil
}
