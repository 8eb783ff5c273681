// Package programs carries the other programs of forkd inside of bin/forkd.
//
// `make build` leaves them in the embedded folder before it builds bin/forkd. A
// build without them (go vet, go test, go install) works and says so when one
// is asked for. What is returned is exactly the file's bytes; who needs a file
// writes it by its digest.
package programs

import (
	"crypto/sha256"
	"embed"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"

	"forkd.dev/forkd/internal/errdefs"
)

//go:embed embedded
var embedded embed.FS

const (
	agentName   = "forkd-agent"
	monitorName = "forkd-vmm"
)

// Agent returns the static program that is PID 1 in the guest.
// ErrUnavailable: this binary was built without it.
func Agent() ([]byte, error) { return read(embedded, agentName) }

// Monitor returns forkd-vmm, the process of one virtual machine of the kvm engine.
// ErrUnavailable: this binary was built without it.
func Monitor() ([]byte, error) { return read(embedded, monitorName) }

// Digest names a program by its content: "sha256-" and 64 hex digits.
func Digest(program []byte) string {
	sum := sha256.Sum256(program)
	return "sha256-" + hex.EncodeToString(sum[:])
}

func read(files fs.FS, name string) ([]byte, error) {
	b, err := fs.ReadFile(files, "embedded/"+name)
	if errors.Is(err, fs.ErrNotExist) {
		err = errdefs.New(errdefs.ErrUnavailable, "program %s is not part of this build", name)
		return nil, errdefs.WithHint(err, "build forkd with `make build`")
	}
	if err != nil {
		return nil, fmt.Errorf("read embedded program %s: %w", name, errdefs.As(errdefs.ErrInternal, err))
	}
	const elfMagic = "\x7fELF"
	if len(b) < len(elfMagic) || string(b[:len(elfMagic)]) != elfMagic {
		return nil, errdefs.New(errdefs.ErrCorrupt, "embedded program %s is no ELF file", name)
	}
	return b, nil
}
