package gvisor

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"
	"time"

	"forkd.dev/forkd/internal/engine"
	"forkd.dev/forkd/internal/errdefs"
)

// The artifacts of a capture.
const (
	stateArtifact = "checkpoint.img" // the user-space kernel's objects
	pagesArtifact = "pages.img"      // memory
	metaArtifact  = "pages_meta.img" // which page of the file is which of the memory
	agentArtifact = "agent"          // only where no ancestor has the same
	descArtifact  = "state.json"     // description

	kindMemory = "memory"
	kindDevice = "device"

	formatRunsc       = "runsc-checkpoint"
	formatProgram     = "elf"
	formatDescription = "forkd-gvisor-1"
)

// description is state.json: what a state needs to be restored.
type description struct {
	Version int             `json:"version"`
	Runsc   string          `json:"runsc"`
	Tree    string          `json:"tree"`  // digest of the root file system
	Agent   string          `json:"agent"` // digest of the program that is init
	Files   []describedFile `json:"files"`
}

// describedFile has enough of a file's content to notice that it is cut or another.
// Whether it is whole is what `forkd verify` tells.
type describedFile struct {
	Name string `json:"name"`
	Size int64  `json:"size"`
	Head string `json:"head"` // SHA-256 of the first headBytes
}

const (
	descriptionVersion = 1
	headBytes          = 64 << 10
	maxDescription     = 64 << 10
)

// Capture has runsc store the sandbox. The guest stands still meanwhile, so the pause
// is as long as the call.
func (m *Machine) Capture(ctx context.Context, spec engine.CaptureSpec) (engine.CaptureResult, error) {
	if err := m.op.take(ctx); err != nil {
		return engine.CaptureResult{}, fmt.Errorf("capture %s: %w", m.rec.ID, err)
	}
	defer m.op.give()
	res, err := m.capture(ctx, spec)
	if err != nil {
		return engine.CaptureResult{}, fmt.Errorf("capture %s: %w", m.rec.ID, err)
	}
	return res, nil
}

func (m *Machine) capture(ctx context.Context, spec engine.CaptureSpec) (res engine.CaptureResult, err error) {
	if err := m.check(); err != nil {
		return res, err
	}
	parent := ""
	if n := len(spec.Parent); n > 0 {
		parent = spec.Parent[n-1].ID
	}
	if own := m.Parent(); own != parent {
		return res, errdefs.New(errdefs.ErrInvalid, "its parent is %q, not %q", own, parent)
	}
	if spec.BeforeStop != nil {
		if err := spec.BeforeStop(ctx); err != nil {
			return res, err
		}
	}
	if m.paused { // runsc talks to the kernel; what it stores stands still all the same
		if err := m.thaw(); err != nil {
			return res, err
		}
		m.paused = false
	}
	began := time.Now()
	if err := m.checkpoint(ctx, spec); err != nil {
		return res, err
	}
	res.Pause = time.Since(began)
	pages, err := os.Stat(filepath.Join(spec.Dir, pagesArtifact))
	if err != nil {
		return res, fmt.Errorf("look at captured memory: %w", err)
	}
	res.CopiedBytes = pages.Size()
	if spec.Resumed != nil && spec.After == engine.AfterResume {
		if err := spec.Resumed(ctx, res); err != nil {
			return res, err
		}
	}
	return res, m.describe(spec, &res)
}

func (m *Machine) checkpoint(ctx context.Context, spec engine.CaptureSpec) error {
	args := []string{"checkpoint", "-compression=none"}
	if spec.After == engine.AfterResume {
		args = append(args, "-leave-running")
	} else {
		m.mu.Lock()
		m.killed = true
		m.mu.Unlock()
	}
	if err := m.d.run(ctx, call{args: append(args, "-image-path", spec.Dir, m.rec.ID)}); err != nil {
		if spec.After == engine.AfterEnd {
			err = errors.Join(err, m.killLocked(context.WithoutCancel(ctx)))
		}
		return err
	}
	if spec.After == engine.AfterEnd {
		return m.killLocked(ctx)
	}
	return nil
}

// describe lists the artifacts and writes what they need.
func (m *Machine) describe(spec engine.CaptureSpec, res *engine.CaptureResult) error {
	agent, err := digestFile(m.rec.Agent)
	if err != nil {
		return err
	}
	desc := description{Version: descriptionVersion, Runsc: m.d.version, Tree: m.rec.Tree, Agent: agent}
	artifacts := []engine.Artifact{
		{Name: stateArtifact, Kind: kindDevice, Format: formatRunsc},
		{Name: pagesArtifact, Kind: kindMemory, Format: formatRunsc},
		{Name: metaArtifact, Kind: kindMemory, Format: formatRunsc},
	}
	if _, err := m.d.agentOf(spec.Parent, agent); errors.Is(err, errdefs.ErrNotFound) {
		if err := copyFile(m.rec.Agent, filepath.Join(spec.Dir, agentArtifact)); err != nil {
			return err
		}
		artifacts = append(artifacts, engine.Artifact{Name: agentArtifact, Kind: kindDevice, Format: formatProgram})
	} else if err != nil {
		return err
	}
	res.Artifacts, err = finishState(spec.Dir, desc, artifacts)
	for _, a := range res.Artifacts {
		res.LayerBytes += a.Bytes
	}
	return err
}

// finishState writes the description of a state whose other files are there.
func finishState(dir string, desc description, artifacts []engine.Artifact) ([]engine.Artifact, error) {
	desc.Files = nil
	for _, a := range artifacts {
		f, err := describeFile(dir, a.Name)
		if err != nil {
			return nil, fmt.Errorf("describe artifact: %w", err)
		}
		desc.Files = append(desc.Files, f)
	}
	text, err := json.Marshal(desc)
	if err != nil {
		return nil, err
	}
	if err := os.WriteFile(filepath.Join(dir, descArtifact), text, 0o600); err != nil {
		return nil, fmt.Errorf("describe state: %w", err)
	}
	artifacts = append(artifacts, engine.Artifact{Name: descArtifact, Kind: kindDevice, Format: formatDescription})
	for i, a := range artifacts {
		st, err := os.Stat(filepath.Join(dir, a.Name))
		if err != nil {
			return nil, fmt.Errorf("list artifacts: %w", err)
		}
		artifacts[i].Bytes = st.Sys().(*syscall.Stat_t).Blocks * 512
	}
	return artifacts, nil
}

func describeFile(dir, name string) (describedFile, error) {
	f, err := os.Open(filepath.Join(dir, name))
	if errors.Is(err, fs.ErrNotExist) {
		return describedFile{}, errdefs.New(errdefs.ErrNotFound, "artifact %s is missing", name)
	}
	if err != nil {
		return describedFile{}, err
	}
	defer f.Close()
	st, err := f.Stat()
	if err != nil {
		return describedFile{}, err
	}
	h := sha256.New()
	if _, err := io.CopyN(h, f, headBytes); err != nil && !errors.Is(err, io.EOF) {
		return describedFile{}, err
	}
	return describedFile{Name: name, Size: st.Size(), Head: hex.EncodeToString(h.Sum(nil))}, nil
}

// readDescription reads the description of a state and compares its files with it.
func readDescription(s engine.State) (description, error) {
	f, err := os.Open(filepath.Join(s.Dir, descArtifact))
	if errors.Is(err, fs.ErrNotExist) {
		return description{}, errdefs.New(errdefs.ErrNotFound, "state %s has no description", s.ID)
	}
	if err != nil {
		return description{}, fmt.Errorf("read description of %s: %w", s.ID, err)
	}
	defer f.Close()
	text, err := io.ReadAll(io.LimitReader(f, maxDescription+1))
	if err != nil {
		return description{}, fmt.Errorf("read description of %s: %w", s.ID, err)
	}
	desc, err := parseDescription(text)
	if err != nil {
		return desc, fmt.Errorf("read description of %s: %w", s.ID, err)
	}
	for _, want := range desc.Files {
		got, err := describeFile(s.Dir, want.Name)
		if err != nil {
			return desc, fmt.Errorf("state %s: %w", s.ID, err)
		}
		if got != want {
			return desc, errdefs.New(errdefs.ErrCorrupt, "state %s: artifact %s is not what was captured", s.ID, want.Name)
		}
	}
	return desc, nil
}

// parseDescription checks a description as far as it can by itself.
func parseDescription(text []byte) (description, error) {
	var desc description
	if len(text) > maxDescription {
		return desc, errdefs.New(errdefs.ErrCorrupt, "description of more than %d bytes", maxDescription)
	}
	if err := json.Unmarshal(text, &desc); err != nil {
		return desc, errdefs.New(errdefs.ErrCorrupt, "description: %v", err)
	}
	if desc.Version != descriptionVersion {
		return desc, errdefs.New(errdefs.ErrIncompatible, "description has version %d, want %d", desc.Version, descriptionVersion)
	}
	need := map[string]bool{stateArtifact: true, pagesArtifact: true, metaArtifact: true}
	for _, f := range desc.Files {
		if f.Name != agentArtifact && !need[f.Name] {
			return desc, errdefs.New(errdefs.ErrCorrupt, "description lists file %.80q", f.Name)
		}
		delete(need, f.Name)
	}
	if len(need) > 0 {
		return desc, errdefs.New(errdefs.ErrCorrupt, "description lists no pages or no state")
	}
	return desc, nil
}

// findAgent returns the path of the agent with that digest: the driver's copy, or
// one made of what a state of chain holds.
func (d *Driver) findAgent(chain []engine.State, digest string) (string, error) {
	path, err := d.agentOf(chain, digest)
	if err != nil {
		return "", err
	}
	program, err := os.ReadFile(path)
	if err != nil {
		return "", fmt.Errorf("read agent program: %w", err)
	}
	if sum := sha256.Sum256(program); hex.EncodeToString(sum[:]) != digest {
		return "", errdefs.New(errdefs.ErrCorrupt, "agent program %s is not what was captured", filepath.Base(filepath.Dir(path)))
	}
	return d.keepAgent(program)
}

// agentOf returns the path of the agent with that digest in chain. ErrNotFound: no
// state of it says that it has that.
func (d *Driver) agentOf(chain []engine.State, digest string) (string, error) {
	for _, s := range chain {
		desc, err := readDescription(s)
		if err != nil || desc.Agent != digest {
			continue // damage of an ancestor is no business of this one, unless it has what is sought
		}
		for _, f := range desc.Files {
			if f.Name == agentArtifact {
				return filepath.Join(s.Dir, agentArtifact), nil
			}
		}
	}
	return "", errdefs.New(errdefs.ErrNotFound, "no state of the chain has agent program %.16s", digest)
}

func digestFile(path string) (string, error) {
	f, err := os.Open(path)
	if err != nil {
		return "", fmt.Errorf("read agent program: %w", err)
	}
	defer f.Close()
	h := sha256.New()
	if _, err := io.Copy(h, f); err != nil {
		return "", fmt.Errorf("read agent program: %w", err)
	}
	return hex.EncodeToString(h.Sum(nil)), nil
}

func copyFile(from, to string) error {
	in, err := os.Open(from)
	if err != nil {
		return fmt.Errorf("copy artifact: %w", err)
	}
	defer in.Close()
	out, err := os.OpenFile(to, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return fmt.Errorf("copy artifact: %w", err)
	}
	_, err = io.Copy(out, in)
	if err = errors.Join(err, out.Close()); err != nil {
		return fmt.Errorf("copy artifact: %w", err)
	}
	return nil
}
