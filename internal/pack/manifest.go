package pack

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"regexp"
	"strings"
	"time"

	"forkd.dev/forkd/internal/errdefs"
)

// Version is the pack version this build writes and reads.
const Version = 1

// ManifestName is the name of the first entry.
const ManifestName = "forkd-pack.json"

// Bounds of a manifest.
const (
	MaxManifestBytes = 32 << 20
	maxFiles         = 64 << 10
	maxName          = 255
	maxWord          = 256
	maxSize          = 1 << 42 // of one file, holes included
)

// Manifest says what a pack holds.
type Manifest struct {
	Version      int       `json:"forkd_pack"`
	CreatedAt    time.Time `json:"created_at"`
	Writer       string    `json:"writer,omitempty"` // forkd's version
	Snapshot     string    `json:"snapshot"`         // id of the last of the chain
	Tag          string    `json:"tag,omitempty"`    // that it had
	HoldsSecrets bool      `json:"holds_secrets"`
	Files        []File    `json:"files"` // in the order of the entries
}

// File is one entry.
type File struct {
	Name   string `json:"name"`
	Size   int64  `json:"size"`   // length, holes included
	Stored int64  `json:"stored"` // bytes in the pack
	SHA256 string `json:"sha256"` // of the stored bytes, hexadecimal
	// Extents are offset and length of the parts that are stored, in order; the rest
	// is zero. Nil stands for all of it.
	Extents [][2]int64 `json:"extents,omitempty"`
}

// extents lists what is stored of f.
func (f File) extents() [][2]int64 {
	if f.Extents == nil && f.Stored > 0 {
		return [][2]int64{{0, f.Stored}}
	}
	return f.Extents
}

var (
	namePart   = regexp.MustCompile(`^[A-Za-z0-9_][A-Za-z0-9._-]{0,127}$`)
	digestForm = regexp.MustCompile(`^[0-9a-f]{64}$`)
)

// CheckName tells why name cannot be that of a file in a pack.
func CheckName(name string) error {
	if len(name) > maxName {
		return fmt.Errorf("file name %.80q has %d characters, more than %d", name, len(name), maxName)
	}
	for part := range strings.SplitSeq(name, "/") {
		if !namePart.MatchString(part) {
			return fmt.Errorf("file name %.260q is not a plain relative name", name)
		}
	}
	if name == ManifestName {
		return fmt.Errorf("file name %s is that of the manifest", name)
	}
	return nil
}

// check tells what is wrong with m.
func (m Manifest) check() error {
	switch {
	case m.CreatedAt.IsZero():
		return fmt.Errorf("created_at is missing")
	case len(m.Writer) > maxWord, len(m.Snapshot) > maxWord, len(m.Tag) > maxWord:
		return fmt.Errorf("a text has more than %d bytes", maxWord)
	case len(m.Files) == 0 || len(m.Files) > maxFiles:
		return fmt.Errorf("%d files, not 1 to %d", len(m.Files), maxFiles)
	}
	seen := map[string]bool{}
	for _, f := range m.Files {
		if err := f.check(); err != nil {
			return err
		}
		if seen[f.Name] {
			return fmt.Errorf("file %s is listed twice", f.Name)
		}
		seen[f.Name] = true
	}
	for name := range seen { // a file cannot be a directory, too
		for i, c := range name {
			if c == '/' && seen[name[:i]] {
				return fmt.Errorf("file %s lies in a file", name)
			}
		}
	}
	return nil
}

func (f File) check() error {
	if err := CheckName(f.Name); err != nil {
		return err
	}
	switch {
	case f.Size < 0 || f.Size > maxSize || f.Stored < 0 || f.Stored > f.Size:
		return fmt.Errorf("file %s has %d bytes of which %d are stored", f.Name, f.Size, f.Stored)
	case !digestForm.MatchString(f.SHA256):
		return fmt.Errorf("file %s has digest %.80q", f.Name, f.SHA256)
	case f.Extents == nil && f.Stored != f.Size && f.Stored != 0:
		return fmt.Errorf("file %s: %d of %d bytes are stored, but not said which", f.Name, f.Stored, f.Size)
	}
	var end, sum int64
	for _, e := range f.extents() {
		if e[0] < end || e[1] <= 0 || e[0] > f.Size || e[1] > f.Size-e[0] {
			return fmt.Errorf("file %s: part %d+%d after %d of %d", f.Name, e[0], e[1], end, f.Size)
		}
		end = e[0] + e[1]
		sum += e[1]
	}
	if sum != f.Stored {
		return fmt.Errorf("file %s: its parts have %d bytes, %d are stored", f.Name, sum, f.Stored)
	}
	return nil
}

// StoredBytes is what all files take together.
func (m Manifest) StoredBytes() int64 {
	var sum int64
	for _, f := range m.Files {
		sum += f.Stored // at most maxFiles times maxSize, which fits
	}
	return sum
}

func encode(m Manifest) ([]byte, error) {
	m.Version = Version
	m.CreatedAt = m.CreatedAt.UTC().Truncate(time.Second)
	if err := m.check(); err != nil {
		return nil, errdefs.New(errdefs.ErrInvalid, "pack manifest: %w", err)
	}
	b, err := json.Marshal(m)
	if err == nil && len(b) > MaxManifestBytes {
		err = errdefs.New(errdefs.ErrInvalid, "pack manifest has %d bytes, more than %d", len(b), MaxManifestBytes)
	}
	return b, err
}

// decode reads a manifest. ErrIncompatible: a newer forkd wrote it.
func decode(b []byte) (Manifest, error) {
	var head struct {
		Version int `json:"forkd_pack"`
	}
	var m Manifest
	if err := json.Unmarshal(b, &head); err != nil {
		return m, errdefs.New(errdefs.ErrCorrupt, "pack manifest: %w", err)
	}
	if head.Version != Version {
		return m, errdefs.WithHint(errdefs.New(errdefs.ErrIncompatible, "pack has version %d, this forkd reads %d", head.Version, Version),
			"use the forkd release that wrote it")
	}
	dec := json.NewDecoder(bytes.NewReader(b))
	dec.DisallowUnknownFields()
	if err := dec.Decode(&m); err != nil {
		return m, errdefs.New(errdefs.ErrCorrupt, "pack manifest: %w", err)
	}
	if _, err := dec.Token(); err != io.EOF {
		return m, errdefs.New(errdefs.ErrCorrupt, "pack manifest: text after its end")
	}
	if err := m.check(); err != nil {
		return m, errdefs.New(errdefs.ErrCorrupt, "pack manifest: %w", err)
	}
	return m, nil
}
