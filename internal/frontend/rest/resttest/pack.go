package resttest

import (
	"context"
	"fmt"
	"io"
	"strings"

	"forkd.dev/forkd/internal/errdefs"
	"forkd.dev/forkd/internal/sandbox"
)

// packText is what a fake pack begins with.
const packText = "fake pack of "

// Pack implements rest.Packer: a line of text and 3 MiB of filling.
func (s *Service) Pack(ctx context.Context, p sandbox.Pack, w io.Writer, _ sandbox.Progress) error {
	sn, err := s.Snapshot(ctx, p.Snapshot)
	if err != nil {
		return err
	}
	if sn.HoldsSecrets && !p.WithSecrets {
		return errdefs.WithHint(errdefs.New(errdefs.ErrConflict, "snapshot %s holds secrets", sn.ID), "--with-secrets")
	}
	if _, err := fmt.Fprintf(w, "%s%s\n", packText, sn.ID); err != nil {
		return err
	}
	filling := strings.Repeat("x", 64<<10)
	for range 48 {
		if _, err := io.WriteString(w, filling); err != nil {
			return err
		}
	}
	return nil
}

// Unpack implements rest.Packer. A refusal comes before the body was read.
func (s *Service) Unpack(_ context.Context, r io.Reader, u sandbox.Unpack, _ sandbox.Progress) (sandbox.Snapshot, error) {
	s.mu.Lock()
	taken := u.Tag != "" && s.taggedLocked(u.Tag) >= 0 && !u.Force
	s.mu.Unlock()
	if taken {
		return sandbox.Snapshot{}, errdefs.New(errdefs.ErrConflict, "tag %q is taken", u.Tag)
	}
	head := make([]byte, len(packText))
	if _, err := io.ReadFull(r, head); err != nil || string(head) != packText {
		return sandbox.Snapshot{}, errdefs.New(errdefs.ErrCorrupt, "it is no pack")
	}
	if n, err := io.Copy(io.Discard, r); err != nil || n < 3<<20 {
		return sandbox.Snapshot{}, errdefs.New(errdefs.ErrCorrupt, "the pack is cut off")
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.changes++
	sn := s.snapshots[0]
	sn.ID, sn.Tags = fmt.Sprintf("sn%020d", len(s.snapshots)+1), []string{u.Tag}
	s.snapshots = append(s.snapshots, sn)
	return sn, nil
}
