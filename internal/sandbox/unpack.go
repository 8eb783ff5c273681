package sandbox

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"forkd.dev/forkd/internal/errdefs"
	"forkd.dev/forkd/internal/ident"
	"forkd.dev/forkd/internal/image"
	"forkd.dev/forkd/internal/linux"
	packfile "forkd.dev/forkd/internal/pack"
	"forkd.dev/forkd/internal/store/metadata"
	"forkd.dev/forkd/internal/store/snapshot"
)

// Unpack says what to do with a pack.
type Unpack struct {
	Tag   string // of the snapshot; "" takes the one it had
	Force bool   // move the tag if it is taken
}

// Unpack reads a pack and makes its snapshot, with its ancestors, its image and its
// kernel, available here under their own ids. What is here already is only checked.
// Everything is verified before anything of it is visible; on an error nothing is.
func (s *Service) Unpack(ctx context.Context, r io.Reader, u Unpack, progress Progress) (Snapshot, error) {
	if progress == nil {
		progress = func(string, float64) {}
	}
	ctx, done, err := s.begin(ctx)
	if err != nil {
		return Snapshot{}, err
	}
	defer done()
	in := &unpacking{s: s, progress: progress, staged: map[string]*snapshot.Staging{}, manifests: map[string]*bytes.Buffer{}}
	id, err := in.run(ctx, r, u)
	if err := errors.Join(err, in.clean()); err != nil {
		return Snapshot{}, fmt.Errorf("unpack: %w", err)
	}
	return s.Snapshot(context.WithoutCancel(ctx), id)
}

// unpacking is one pack on its way in.
type unpacking struct {
	s        *Service
	progress Progress
	pack     packfile.Manifest
	images   image.Receiver
	// ids of the snapshots in the order of the pack, which is root first. Those that
	// are not here yet are staged.
	ids       []string
	staged    map[string]*snapshot.Staging
	manifests map[string]*bytes.Buffer
	read      int64 // stored bytes so far
}

func (in *unpacking) run(ctx context.Context, r io.Reader, u Unpack) (string, error) {
	mover, err := in.s.mover()
	if err != nil {
		return "", err
	}
	room, err := in.s.room()
	if err != nil {
		return "", err
	}
	p, err := packfile.Open(r, packfile.Limits{MaxBytes: room, MaxSize: maxDiskMiB << 20})
	if err != nil {
		return "", err
	}
	defer p.Close()
	in.pack = p.Manifest()
	if ident.KindOf(in.pack.Snapshot) != ident.Snapshot && ident.KindOf(in.pack.Snapshot) != ident.Checkpoint {
		return "", errdefs.New(errdefs.ErrCorrupt, "the pack is of %.80q, which is no snapshot id", in.pack.Snapshot)
	}
	if u.Tag == "" {
		u.Tag = in.pack.Tag
	}
	if err := in.s.checkUnpackTag(ctx, u, in.pack.Snapshot); err != nil {
		return "", err
	}
	if in.images, err = mover.Receive(); err != nil {
		return "", err
	}
	if err := p.Extract(ctx, in.create); err != nil {
		return "", err
	}
	chain, err := in.check()
	if err != nil {
		return "", err
	}
	return in.pack.Snapshot, in.publish(ctx, chain, u)
}

// checkUnpackTag is checkNewTag, but the tag may be at its goal already.
func (s *Service) checkUnpackTag(ctx context.Context, u Unpack, id string) error {
	tags, err := s.tagsByID(ctx)
	if err != nil {
		return err
	}
	if slices.Contains(tags[id], u.Tag) {
		return nil
	}
	err = s.checkNewTag(ctx, u.Tag, u.Force)
	if errors.Is(err, errdefs.ErrConflict) {
		err = errdefs.WithHint(err, "give another with --tag, or move it with --force")
	}
	return err
}

// room is how many bytes may come in.
func (s *Service) room() (int64, error) {
	if err := s.checkSpace("unpack", 0); err != nil {
		return 0, err
	}
	if s.cfg.MinFreeBytes < 0 {
		return math.MaxInt64, nil
	}
	disk, err := linux.ReadDisk(s.cfg.Dir)
	return disk.AvailableBytes - s.cfg.MinFreeBytes, err
}

// create finds the place of one file of the pack.
func (in *unpacking) create(f packfile.File) (packfile.Target, error) {
	in.progress("unpacking "+f.Name, float64(in.read)/float64(max(in.pack.StoredBytes(), 1)))
	in.read += f.Stored
	rest, ok := strings.CutPrefix(f.Name, snapshotsPart)
	if !ok {
		file, err := in.images.Create(f.Name, f.Size)
		if err != nil || file == nil {
			return nil, err
		}
		return file, nil
	}
	id, name, _ := strings.Cut(rest, "/")
	if k := ident.KindOf(id); k != ident.Snapshot && k != ident.Checkpoint || strings.ContainsRune(name, '/') {
		return nil, errdefs.New(errdefs.ErrCorrupt, "there is no place for a file %.260q", f.Name)
	}
	if err := in.begin(id); err != nil {
		return nil, err
	}
	if name == snapshot.ManifestName {
		if f.Size > snapshot.MaxManifestBytes {
			return nil, errdefs.New(errdefs.ErrCorrupt, "manifest of %s has %d bytes", id, f.Size)
		}
		in.manifests[id] = bytes.NewBuffer(make([]byte, f.Size))
		return memoryTarget{in.manifests[id].Bytes()}, nil
	}
	st := in.staged[id]
	if st == nil {
		return nil, nil // it is here already
	}
	return createSized(filepath.Join(st.Dir(), name), f.Size)
}

// begin stages a snapshot that is not here.
func (in *unpacking) begin(id string) error {
	if slices.Contains(in.ids, id) {
		return nil
	}
	in.ids = append(in.ids, id)
	_, err := in.s.cfg.Store.Get(id)
	if !errors.Is(err, errdefs.ErrNotFound) {
		return err // here, or here but damaged
	}
	in.staged[id], err = in.s.cfg.Store.Stage(id)
	return err
}

// memoryTarget takes a small file.
type memoryTarget struct{ b []byte }

func (m memoryTarget) WriteAt(p []byte, off int64) (int, error) { return copy(m.b[off:], p), nil }
func (m memoryTarget) Close() error                             { return nil }

func createSized(path string, size int64) (*os.File, error) {
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return nil, fmt.Errorf("create file: %w", err)
	}
	if err := f.Truncate(size); err != nil {
		return nil, errors.Join(fmt.Errorf("create file: %w", err), f.Close())
	}
	return f, nil
}

// check compares the manifests of the snapshots with each other and with what is here.
func (in *unpacking) check() ([]snapshot.Manifest, error) {
	var chain []snapshot.Manifest
	parent := ""
	for _, id := range in.ids {
		if in.manifests[id] == nil {
			return nil, errdefs.New(errdefs.ErrCorrupt, "the pack has no manifest of snapshot %s", id)
		}
		m, err := snapshot.DecodeManifest(in.manifests[id].Bytes())
		if err != nil {
			return nil, fmt.Errorf("snapshot %s: %w", id, err)
		}
		if m.ID != id || m.ParentID != parent {
			return nil, errdefs.New(errdefs.ErrCorrupt, "the manifest of snapshot %s is of %s, made from %q, not from %q", id, m.ID, m.ParentID, parent)
		}
		if st := in.staged[id]; st != nil {
			err = in.s.checkForeign(m, st.Dir())
		} else if have, getErr := in.s.cfg.Store.Get(id); getErr != nil || !snapshot.Same(m, have) {
			err = errdefs.New(errdefs.ErrConflict, "there is another snapshot %s here, and it differs", id)
		}
		if err != nil {
			return nil, err
		}
		chain, parent = append(chain, m), id
	}
	if parent != in.pack.Snapshot {
		return nil, errdefs.New(errdefs.ErrCorrupt, "the last snapshot of the pack is %q, not %s", parent, in.pack.Snapshot)
	}
	return chain, nil
}

// publish makes image and chain visible, and the snapshot ready once it was restored.
func (in *unpacking) publish(ctx context.Context, chain []snapshot.Manifest, u Unpack) (err error) {
	in.progress("checking digests", -1)
	last := chain[len(chain)-1]
	img, isNew, err := in.images.Publish(ctx)
	var made []string
	defer func() {
		if err == nil {
			return
		}
		clean := context.WithoutCancel(ctx)
		for _, id := range slices.Backward(made) {
			err = errors.Join(err, in.s.removeSnapshot(clean, id))
		}
		if isNew {
			err = errors.Join(err, in.s.cfg.Images.Remove(clean, img.ID))
		}
	}()
	if err != nil {
		return err
	}
	release, err := in.s.useImage(img.ID)
	if err != nil {
		return err
	}
	defer release() // before the image is removed again, if it is
	if img.ID != last.Image.ID {
		return errdefs.New(errdefs.ErrCorrupt, "the pack has image %s, its snapshot needs %s", img.ID, last.Image.ID)
	}
	for _, m := range chain {
		st := in.staged[m.ID]
		if st == nil {
			continue
		}
		m.Labels = foreignLabels(m.Labels)
		row := metadata.Snapshot{ID: m.ID, Status: string(SnapshotReady), Engine: m.Compat.Engine, CreatedAt: m.CreatedAt}
		if _, err := st.PublishCopy(ctx, m); err != nil {
			return err
		}
		made = append(made, m.ID)
		if err := in.s.cfg.Journal.PutSnapshot(ctx, row); err != nil {
			return err
		}
	}
	if in.staged[last.ID] == nil { // its row says what is known about it
		if u.Tag == "" {
			return nil
		}
		return in.s.cfg.Journal.SetTag(ctx, u.Tag, last.ID, tagPolicy(u.Force))
	}
	if err := in.tryHere(ctx, last); err != nil {
		return err
	}
	return in.s.cfg.Journal.PublishSnapshot(ctx, metadata.Snapshot{ID: last.ID, Status: string(SnapshotReady), Engine: last.Compat.Engine, CreatedAt: last.CreatedAt}, u.Tag, tagPolicy(u.Force))
}

// tryHere restores the snapshot once, unless this host says beforehand that it cannot:
// then it is listed as stale.
func (in *unpacking) tryHere(ctx context.Context, m snapshot.Manifest) error {
	if in.s.cfg.Engine.CheckCompat(m.Compat) != nil {
		return nil
	}
	in.progress("checking that it restores", -1)
	root, err := in.s.cfg.Images.Root(ctx, m.Image.ID)
	if err != nil {
		return err
	}
	if err := in.s.tryRestore(ctx, m.ID, m.Shape, root); err != nil {
		return fmt.Errorf("the snapshot does not restore: %w", err)
	}
	return nil
}

// foreignLabels drops what was true only where the snapshot was made.
func foreignLabels(labels map[string]string) map[string]string {
	out := withLabels(labels, nil)
	for _, l := range []string{labelAnonymous, labelAutoTag, labelExpires, labelCheckpointOf, labelMadeFrom, builtinLabel} {
		delete(out, l)
	}
	return out
}

// clean removes what was not published.
func (in *unpacking) clean() error {
	var errs []error
	for _, st := range in.staged {
		errs = append(errs, st.Discard())
	}
	if in.images != nil {
		errs = append(errs, in.images.Discard())
	}
	return errors.Join(errs...)
}
