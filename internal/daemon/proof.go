package daemon

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"

	"forkd.dev/forkd/internal/errdefs"
)

// A proof that an engine works takes a second, so it is remembered in the engine's
// directory, by what it depends on: the program, the host's kernel, the agent. A
// failure is not: it may have been the moment's.

// proofFile is its name in the engine's directory.
const proofFile = "proof.json"

// maxProofBytes bounds the file.
const maxProofBytes = 4096

// proofKey is what a proof depends on.
type proofKey struct {
	Program string `json:"program"` // SHA-256
	Kernel  string `json:"kernel"`  // release
	Agent   string `json:"agent"`   // digest
	UID     int    `json:"uid"`     // others have other means of confinement
}

// remembered does prove unless a proof with this key stands in dir. A proof that cannot
// be written is made again the next time.
func remembered(ctx context.Context, dir string, key proofKey, prove func(context.Context) error) error {
	path := filepath.Join(dir, proofFile)
	if have, err := readProof(path); err == nil && have == key {
		return nil
	}
	if err := prove(ctx); err != nil {
		return err
	}
	raw, err := json.Marshal(key)
	if err != nil {
		return fmt.Errorf("write proof: %w", err)
	}
	_ = writeProof(path, append(raw, '\n'))
	return nil
}

func readProof(path string) (proofKey, error) {
	f, err := os.Open(path)
	if err != nil {
		return proofKey{}, err
	}
	defer f.Close()
	var key proofKey
	if err := json.NewDecoder(io.LimitReader(f, maxProofBytes)).Decode(&key); err != nil {
		return proofKey{}, errdefs.New(errdefs.ErrCorrupt, "proof %s: %w", path, err)
	}
	return key, nil
}

// writeProof writes it whole or not at all, if the engine's directory is there.
func writeProof(path string, raw []byte) error {
	tmp, err := os.CreateTemp(filepath.Dir(path), ".proof-")
	if err != nil {
		return err
	}
	defer os.Remove(tmp.Name()) // nothing is there any more once it is in its place
	_, err = tmp.Write(raw)
	if err = errors.Join(err, tmp.Close()); err != nil {
		return err
	}
	return os.Rename(tmp.Name(), path)
}

// programDigest is the SHA-256 of a program.
func programDigest(path string) (string, error) {
	f, err := os.Open(path)
	if err != nil {
		return "", fmt.Errorf("read program: %w", err)
	}
	defer f.Close()
	h := sha256.New()
	if _, err := io.Copy(h, f); err != nil {
		return "", fmt.Errorf("read program: %w", err)
	}
	return hex.EncodeToString(h.Sum(nil)), nil
}
