package snapshot

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"

	"forkd.dev/forkd/internal/errdefs"
	"forkd.dev/forkd/internal/layerfmt"
)

// Staging is a snapshot in the making. It ends with Publish or Discard.
type Staging struct {
	store *Store
	id    string
	dir   string

	mu sync.Mutex
	// +checklocks:mu
	state stagingState
}

type stagingState int

const (
	stagingOpen stagingState = iota
	stagingBusy
	stagingDone
)

// Stage reserves id and makes an empty directory for its artifacts, in the same
// file system as the store. ErrConflict: the id is in use.
func (s *Store) Stage(id string) (*Staging, error) {
	if err := checkID(id); err != nil {
		return nil, fmt.Errorf("stage snapshot: %w", err)
	}
	if err := s.reserve(id); err != nil {
		return nil, fmt.Errorf("stage snapshot %s: %w", id, err)
	}
	st := &Staging{store: s, id: id, dir: filepath.Join(s.dir, stagingPrefix+id)}
	// The reservation makes whatever has this name garbage of a failed Discard.
	err := os.RemoveAll(st.dir)
	if err == nil {
		err = os.Mkdir(st.dir, 0o700)
	}
	if err != nil {
		s.unreserve(id)
		return nil, fmt.Errorf("stage snapshot %s: %w", id, classify(err))
	}
	return st, nil
}

func (s *Store) reserve(id string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if what, ok := s.busy[id]; ok {
		return errdefs.New(errdefs.ErrConflict, "it is %s", what)
	}
	if _, err := s.getLocked(id); !errors.Is(err, errdefs.ErrNotFound) {
		return errdefs.New(errdefs.ErrConflict, "it exists")
	}
	s.busy[id] = "being made"
	return nil
}

func (s *Store) unreserve(id string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.busy, id)
}

// Dir is where the caller and the engine write the artifacts.
func (st *Staging) Dir() string { return st.dir }

// ID is the id of the snapshot in the making.
func (st *Staging) ID() string { return st.id }

// begin takes the staging for one operation.
func (st *Staging) begin() error {
	st.mu.Lock()
	defer st.mu.Unlock()
	switch st.state {
	case stagingBusy:
		return errdefs.New(errdefs.ErrConflict, "it is being published or discarded")
	case stagingDone:
		return errdefs.New(errdefs.ErrConflict, "it was published or discarded")
	}
	st.state = stagingBusy
	return nil
}

func (st *Staging) end(next stagingState) {
	st.mu.Lock()
	defer st.mu.Unlock()
	st.state = next
}

// Discard deletes the staging directory. After Publish succeeded, and when
// repeated, it does nothing, so it may be deferred.
func (st *Staging) Discard() error {
	st.mu.Lock()
	done := st.state == stagingDone
	st.mu.Unlock()
	if done {
		return nil
	}
	if err := st.begin(); err != nil {
		return fmt.Errorf("discard snapshot %s: %w", st.id, err)
	}
	defer st.end(stagingDone)
	defer st.store.unreserve(st.id)
	if err := os.RemoveAll(st.dir); err != nil {
		return fmt.Errorf("discard snapshot %s: %w", st.id, classify(err))
	}
	return nil
}

// Publish makes the snapshot visible and returns its complete manifest. Every file
// in the directory must be listed in m, be a plain file with one link, and have no
// writer any more. Digests, sizes and m.ID are filled in where missing. On an
// error nothing is visible; the caller may try again or discard.
func (st *Staging) Publish(ctx context.Context, m Manifest) (Manifest, error) {
	if err := st.begin(); err != nil {
		return Manifest{}, fmt.Errorf("publish snapshot %s: %w", st.id, err)
	}
	m, err := st.publish(ctx, m.clone())
	if err != nil {
		st.end(stagingOpen)
		return Manifest{}, fmt.Errorf("publish snapshot %s: %w", st.id, err)
	}
	st.end(stagingDone)
	return m, nil
}

func (st *Staging) publish(ctx context.Context, m Manifest) (Manifest, error) {
	if m.ID == "" {
		m.ID = st.id
	}
	if m.ID != st.id {
		return m, errdefs.New(errdefs.ErrInvalid, "the manifest is that of %s", m.ID)
	}
	if m.ParentID != "" {
		release, err := st.store.Lease(m.ParentID, "publish "+st.id)
		if err != nil {
			return m, err
		}
		defer release()
		parent, err := st.store.Get(m.ParentID)
		if err != nil {
			return m, err
		}
		if err := checkFits(m, parent); err != nil {
			return m, errdefs.As(errdefs.ErrInvalid, err)
		}
	}
	if err := st.sealAll(ctx, &m); err != nil {
		return m, err
	}
	m, b, err := encodeManifest(m)
	if err != nil {
		return m, err
	}
	if err := st.writeManifest(b); err != nil {
		return m, err
	}
	return m, st.makeVisible(ctx, m)
}

// checkFits refuses a parent that the child's layers cannot lie on.
func checkFits(m, parent Manifest) error {
	switch {
	case m.Compat.Engine != parent.Compat.Engine:
		return fmt.Errorf("it is of engine %s, its parent %s of %s", m.Compat.Engine, parent.ID, parent.Compat.Engine)
	case m.Shape != parent.Shape:
		return fmt.Errorf("it has shape %+v, its parent %s has %+v", m.Shape, parent.ID, parent.Shape)
	case m.Image.ID != parent.Image.ID:
		return fmt.Errorf("it is of image %s, its parent %s of %s", m.Image.ID, parent.ID, parent.Image.ID)
	}
	return nil
}

// sealAll makes all artifacts read-only and durable and completes their entries.
func (st *Staging) sealAll(ctx context.Context, m *Manifest) error {
	if err := m.checkArtifactNames(); err != nil {
		return errdefs.As(errdefs.ErrInvalid, err)
	}
	// A manifest of an earlier try must not count as unlisted.
	if err := os.Remove(filepath.Join(st.dir, ManifestName)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return classify(err)
	}
	if err := checkUnlisted(st.dir, *m); err != nil {
		return errdefs.As(errdefs.ErrInvalid, err)
	}
	for i := range m.Artifacts {
		a := &m.Artifacts[i]
		if err := st.seal(ctx, a, m.ParentID); err != nil {
			return fmt.Errorf("artifact %s: %w", a.Name, err)
		}
		if err := st.store.step(StepSealArtifact, filepath.Join(st.dir, a.Name)); err != nil {
			return err
		}
	}
	return nil
}

// checkUnlisted makes sure that the directory has no file that m does not list.
func checkUnlisted(dir string, m Manifest) error {
	listed := map[string]bool{ManifestName: true}
	for _, a := range m.Artifacts {
		listed[a.Name] = true
	}
	entries, err := os.ReadDir(dir)
	if err != nil {
		return err
	}
	for _, e := range entries {
		if !listed[e.Name()] {
			return fmt.Errorf("file %.140q is not listed in the manifest", e.Name())
		}
	}
	return nil
}

// sealed tells whether a file is as seal leaves it: nobody can open it for writing.
func (st *Staging) sealed(stat unix.Stat_t) bool {
	return int(stat.Uid) == os.Geteuid() && fs.FileMode(stat.Mode).Perm() == st.store.fileMode
}

func (st *Staging) seal(ctx context.Context, a *Artifact, parent string) error {
	f, err := openRegular(filepath.Join(st.dir, a.Name))
	if errors.Is(err, fs.ErrNotExist) {
		return errdefs.New(errdefs.ErrInvalid, "the file does not exist")
	}
	if err != nil {
		return errdefs.As(errdefs.ErrInvalid, err)
	}
	defer f.Close()
	var stat unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &stat); err != nil {
		return err
	}
	// A machine that goes on after its capture keeps a link until it knows that the
	// snapshot is published, and only reads the file. One that we sealed already can be
	// part of any number of snapshots.
	if stat.Nlink > 2 && !st.sealed(stat) {
		return errdefs.New(errdefs.ErrInvalid, "the file has %d links: it could be changed under another name", stat.Nlink)
	}
	// A confined engine may have written it as another user.
	if euid := os.Geteuid(); euid == 0 && (stat.Uid != 0 || stat.Gid != 0) {
		if err := f.Chown(0, 0); err != nil {
			return classify(err)
		}
	}
	if err := f.Chmod(st.store.fileMode); err != nil {
		return classify(err)
	}
	if err := checkLayer(f, stat.Size, *a, parent); err != nil {
		return err
	}
	if a.Digest == "" {
		if a.Digest, err = digestFile(ctx, f); err != nil {
			return err
		}
	}
	if err := f.Sync(); err != nil {
		return classify(err)
	}
	// Blocks may be allocated only when they are written back.
	if err := unix.Fstat(int(f.Fd()), &stat); err != nil {
		return err
	}
	if a.Size != 0 && a.Size != stat.Size {
		return errdefs.New(errdefs.ErrInvalid, "the file has %d bytes, the manifest says %d", stat.Size, a.Size)
	}
	a.Size = stat.Size
	a.Bytes = stat.Blocks * 512
	return nil
}

// checkLayer makes sure that a memory layer is well-formed and lies on the right parent.
func checkLayer(f io.ReaderAt, size int64, a Artifact, parent string) error {
	if a.Format != layerfmt.Format {
		return nil
	}
	r, err := layerfmt.Open(f, size)
	if err != nil {
		return err
	}
	if p := r.Header().Parent; p != "" && p != parent {
		return errdefs.New(errdefs.ErrCorrupt, "the layer lies on %s, the snapshot on %q", p, parent)
	}
	return nil
}

// digestFile hashes a file from its start.
func digestFile(ctx context.Context, f io.ReaderAt) (string, error) {
	h := sha256.New()
	buf := make([]byte, 1<<20)
	for off := int64(0); ; {
		if err := ctx.Err(); err != nil {
			return "", err
		}
		n, err := f.ReadAt(buf, off)
		h.Write(buf[:n])
		off += int64(n)
		if errors.Is(err, io.EOF) {
			return digestPrefix + hex.EncodeToString(h.Sum(nil)), nil
		}
		if err != nil {
			return "", classify(err)
		}
	}
}

func (st *Staging) writeManifest(b []byte) error {
	path := filepath.Join(st.dir, ManifestName)
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL|syscall.O_NOFOLLOW, st.store.fileMode)
	if err != nil {
		return classify(err)
	}
	defer f.Close()
	if _, err := io.Copy(f, bytes.NewReader(b)); err != nil {
		return classify(err)
	}
	if err := f.Chmod(st.store.fileMode); err != nil { // whatever the umask is
		return classify(err)
	}
	if err := st.store.step(StepWriteManifest, path); err != nil {
		return err
	}
	if err := f.Sync(); err != nil {
		return classify(err)
	}
	return st.store.step(StepSyncManifest, path)
}

// makeVisible is the last, atomic part: until the rename there is no snapshot.
func (st *Staging) makeVisible(ctx context.Context, m Manifest) error {
	s, final := st.store, st.store.Dir(st.id)
	if err := os.Chmod(st.dir, s.dirMode); err != nil {
		return classify(err)
	}
	if err := syncDir(st.dir); err != nil {
		return classify(err)
	}
	if err := s.step(StepSyncStaging, st.dir); err != nil {
		return err
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	if err := os.Rename(st.dir, final); err != nil {
		return classify(err)
	}
	if err := s.step(StepPublish, final); err != nil {
		return err
	}
	if err := syncDir(s.dir); err != nil {
		// It may or may not be durable: take it back, so that it is not.
		return errors.Join(classify(err), os.Rename(final, st.dir))
	}
	if err := s.step(StepSyncPublish, s.dir); err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.busy, st.id)
	s.ready[st.id] = m.clone()
	return nil
}
