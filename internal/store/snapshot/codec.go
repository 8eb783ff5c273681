package snapshot

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"io"
	"strings"
	"time"

	"forkd.dev/forkd/internal/errdefs"
)

const digestPrefix = "sha256:"

// blankSum stands in the place of the checksum while it is computed.
var blankSum = digestPrefix + strings.Repeat("0", 2*sha256.Size)

func digestOf(b []byte) string {
	sum := sha256.Sum256(b)
	return digestPrefix + hex.EncodeToString(sum[:])
}

// encodeManifest checks m and returns it, completed, with its bytes. The checksum
// is that of the file with zeros in its place, so a reader needs no canonical JSON.
func encodeManifest(m Manifest) (Manifest, []byte, error) {
	m = m.clone()
	m.Version, m.Checksum = Version, blankSum
	m.CreatedAt = m.CreatedAt.UTC().Truncate(time.Microsecond)
	if err := m.check(); err != nil {
		return m, nil, errdefs.New(errdefs.ErrInvalid, "manifest: %w", err)
	}
	var buf bytes.Buffer
	enc := json.NewEncoder(&buf)
	enc.SetEscapeHTML(false)
	enc.SetIndent("", "  ")
	if err := enc.Encode(m); err != nil {
		return m, nil, errdefs.New(errdefs.ErrInvalid, "manifest: %w", err)
	}
	b := buf.Bytes()
	if len(b) > MaxManifestBytes {
		return m, nil, errdefs.WithHint(errdefs.New(errdefs.ErrInvalid, "manifest has %d bytes, more than %d", len(b), MaxManifestBytes),
			"make the recipe shorter: put long programs into the image")
	}
	m.Checksum = digestOf(b)
	copy(b[bytes.LastIndex(b, []byte(blankSum)):], m.Checksum)
	return m, b, nil
}

// decodeManifest reads and checks a manifest. ErrIncompatible: it is whole, but
// written by a newer forkd. ErrCorrupt: it is damaged.
func decodeManifest(b []byte) (Manifest, error) {
	var m Manifest
	if len(b) > MaxManifestBytes {
		return m, errdefs.New(errdefs.ErrCorrupt, "manifest has more than %d bytes", MaxManifestBytes)
	}
	var head struct {
		Version  int    `json:"version"`
		Checksum string `json:"checksum"`
	}
	if err := json.Unmarshal(b, &head); err != nil {
		return m, errdefs.New(errdefs.ErrCorrupt, "manifest: %w", err)
	}
	if head.Version != Version {
		return m, errdefs.WithHint(errdefs.New(errdefs.ErrIncompatible, "manifest has version %d, this forkd reads %d", head.Version, Version),
			"use the forkd release that wrote it, or rebuild the snapshot")
	}
	if err := checkSum(b, head.Checksum); err != nil {
		return m, err
	}
	dec := json.NewDecoder(bytes.NewReader(b))
	dec.DisallowUnknownFields()
	if err := dec.Decode(&m); err != nil {
		// The bytes are as written, so their writer knew more than we do.
		return m, errdefs.New(errdefs.ErrIncompatible, "manifest: %w", err)
	}
	if _, err := dec.Token(); err != io.EOF {
		return m, errdefs.New(errdefs.ErrCorrupt, "manifest: text after its end")
	}
	if err := m.check(); err != nil {
		return m, errdefs.New(errdefs.ErrCorrupt, "manifest: %w", err)
	}
	return m, nil
}

func checkSum(b []byte, sum string) error {
	if !digestForm.MatchString(sum) || bytes.Count(b, []byte(sum)) != 1 {
		return errdefs.New(errdefs.ErrCorrupt, "manifest checksum %.80q is malformed", sum)
	}
	if got := digestOf(bytes.Replace(b, []byte(sum), []byte(blankSum), 1)); got != sum {
		return errdefs.New(errdefs.ErrCorrupt, "manifest has checksum %s, not %s", got, sum)
	}
	return nil
}

// parentOf finds the parent in a manifest that cannot be read, or "".
func parentOf(b []byte) string {
	var m struct {
		ParentID string `json:"parent_id"`
	}
	if err := json.Unmarshal(b, &m); err != nil || !isSnapshotID(m.ParentID) {
		return ""
	}
	return m.ParentID
}
