package sandbox

import (
	"archive/tar"
	"bytes"
	"context"
	"crypto/sha512"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"maps"
	"path"
	"slices"
	"strconv"
	"strings"

	"forkd.dev/forkd/internal/agentwire"
	"forkd.dev/forkd/internal/errdefs"
	"forkd.dev/forkd/internal/guest"
)

// ChildInput is what one child of a fork gets on top of what all get.
type ChildInput struct {
	Env    map[string]string
	Labels map[string]string
	// Files are written before any process of the user goes on, by absolute path,
	// owned by root with mode 0644.
	Files map[string][]byte
}

// Reseed says how far the generators of a fork are made unique.
type Reseed struct {
	Mode agentwire.Reseed // "" means all
	Seed uint64           // with ReseedSeed: generators of child i come from (Seed, i)
}

// ParseReseed reads "", "all", "system" or "seed=N".
func ParseReseed(text string) (Reseed, error) {
	switch agentwire.Reseed(text) {
	case "", agentwire.ReseedAll, agentwire.ReseedSystem:
		return Reseed{Mode: agentwire.Reseed(text)}, nil
	}
	if digits, ok := strings.CutPrefix(text, "seed="); ok {
		if n, err := strconv.ParseUint(digits, 10, 64); err == nil {
			return Reseed{Mode: agentwire.ReseedSeed, Seed: n}, nil
		}
	}
	return Reseed{}, errdefs.WithHint(errdefs.New(errdefs.ErrInvalid, "reseed %.40q is not all, system or seed=N", text),
		"N is a number from 0 to 2^64-1")
}

// runnerSeed is what the generators of child index of a seeded fork come from.
func (r Reseed) runnerSeed(index int) []byte {
	if r.Mode != agentwire.ReseedSeed {
		return nil
	}
	text := []byte("forkd seed\x00")
	text = binary.BigEndian.AppendUint64(text, r.Seed)
	text = binary.BigEndian.AppendUint64(text, uint64(index))
	sum := sha512.Sum512(text)
	return sum[:]
}

// Environment that every child of a fork has.
const (
	envIndex = "FORKD_INDEX" // 0 to n-1
	envCount = "FORKD_COUNT" // n
	envBatch = "FORKD_BATCH" // id of the fork call
)

// Bounds of the files of one child. They travel through memory.
const (
	maxChildFiles     = 4096
	maxChildFileBytes = 16 << 20
	maxFilePath       = 4096
)

// checkInputs checks what single children get, and takes their number from them if
// none is given.
func checkInputs(f *Fork) error {
	if len(f.Children) > 0 && f.N == 0 {
		f.N = len(f.Children)
	}
	if len(f.Children) > 0 && f.N != len(f.Children) {
		return errdefs.New(errdefs.ErrInvalid, "n is %d, but there are inputs for %d children", f.N, len(f.Children))
	}
	if err := checkEnv(f.Secrets); err != nil {
		return fmt.Errorf("secrets: %w", err)
	}
	if err := checkEnv(f.Env); err != nil {
		return err
	}
	for i, c := range f.Children {
		if err := c.check(f); err != nil {
			return fmt.Errorf("child %d: %w", i, err)
		}
	}
	return nil
}

func (c ChildInput) check(f *Fork) error {
	if err := checkLabels(c.Labels); err != nil {
		return err
	}
	all := withLabels(withLabels(f.Env, c.Env), f.Secrets)
	if err := checkEnv(all); err != nil {
		return err
	}
	if len(c.Files) > maxChildFiles {
		return errdefs.New(errdefs.ErrInvalid, "%d files are more than %d", len(c.Files), maxChildFiles)
	}
	total := 0
	for name, content := range c.Files {
		if err := checkFilePath(name); err != nil {
			return err
		}
		if total += len(content); total > maxChildFileBytes {
			return errdefs.WithHint(errdefs.New(errdefs.ErrInvalid, "its files have more than %d bytes together", maxChildFileBytes),
				"put what is larger into the snapshot: forkd snapshot --copy")
		}
	}
	return nil
}

func checkFilePath(name string) error {
	if !path.IsAbs(name) || path.Clean(name) != name || name == "/" || len(name) > maxFilePath || strings.Contains(name, "\x00") {
		return errdefs.New(errdefs.ErrInvalid, "file %.200q is not named by a plain absolute path", name)
	}
	return nil
}

// archive returns the files as a tar archive, or nil.
func (c ChildInput) archive() ([]byte, error) {
	if len(c.Files) == 0 {
		return nil, nil
	}
	var out bytes.Buffer
	w := tar.NewWriter(&out)
	for _, name := range slices.Sorted(maps.Keys(c.Files)) {
		content := c.Files[name]
		h := &tar.Header{Name: strings.TrimPrefix(name, "/"), Typeflag: tar.TypeReg, Mode: 0o644, Size: int64(len(content))}
		if err := w.WriteHeader(h); err != nil {
			return nil, fmt.Errorf("pack file %.200q: %w", name, err)
		}
		if _, err := w.Write(content); err != nil {
			return nil, fmt.Errorf("pack file %.200q: %w", name, err)
		}
	}
	return out.Bytes(), w.Close()
}

// input is what child i gets on top of the others.
func (f Fork) input(i int) ChildInput {
	if i < len(f.Children) {
		return f.Children[i]
	}
	return ChildInput{}
}

// place is a child's place in its fork call, as its guest reads it.
type place struct {
	Index   int               `json:"index"`
	Count   int               `json:"count"`
	Batch   string            `json:"batch"`
	Parent  string            `json:"parent"` // snapshot id
	Sandbox string            `json:"sandbox"`
	Labels  map[string]string `json:"labels"`
}

// identityOf is the identity of a child, with all that it is given.
func (b *batch) identityOf(c *child) (agentwire.Identity, error) {
	batchID, count := c.info.Labels[labelBatch], strconv.Itoa(len(b.children))
	env := withLabels(withLabels(b.req.Env, b.req.input(c.index).Env), map[string]string{
		envIndex: strconv.Itoa(c.index), envCount: count, envBatch: batchID,
	})
	id := newIdentity(c.info.ID, hostnameOf(c.info), env)
	id.Secrets = b.req.Secrets
	if b.req.Reseed.Mode != "" {
		id.Reseed = b.req.Reseed.Mode
	}
	id.RunnerSeed = b.req.Reseed.runnerSeed(c.index)
	labels := maps.Clone(c.info.Labels)
	maps.DeleteFunc(labels, func(k, _ string) bool { return reserved(k) })
	var err error
	id.Fork, err = json.Marshal(place{
		Index: c.index, Count: len(b.children), Batch: batchID, Parent: b.plan.id, Sandbox: c.info.ID, Labels: labels,
	})
	id.Fork = append(id.Fork, '\n')
	return id, err
}

// giveFiles writes a child's files while its user processes stand still.
func (b *batch) giveFiles(ctx context.Context, agent Agent, c *child) error {
	archive, err := b.req.input(c.index).archive()
	if err != nil || archive == nil {
		return err
	}
	return guest.Unpack(ctx, agent, bytes.NewReader(archive))
}

// reserved tells whether a label is one of ours.
func reserved(label string) bool { return strings.HasPrefix(label, "forkd.") }

// inherited are the labels that children of a running sandbox have from it.
func inherited(source Sandbox) map[string]string {
	labels := maps.Clone(source.Labels)
	maps.DeleteFunc(labels, func(k, _ string) bool { return reserved(k) })
	return labels
}

// checkSecrets refuses what would hand on secrets that somebody gave a sandbox,
// unless the caller knows.
func checkSecrets(what string, holds, agreed bool) error {
	if !holds || agreed {
		return nil
	}
	return errdefs.WithHint(errdefs.New(errdefs.ErrConflict, "%s holds secrets in its memory: whoever gets a copy can read them", what),
		"say that this is meant with --with-secrets (with_secrets: true)")
}
