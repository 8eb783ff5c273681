package sandbox

import (
	"context"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"time"

	"forkd.dev/forkd/internal/engine"
	"forkd.dev/forkd/internal/errdefs"
	"forkd.dev/forkd/internal/image"
	"forkd.dev/forkd/internal/linux"
	packfile "forkd.dev/forkd/internal/pack"
	"forkd.dev/forkd/internal/store/snapshot"
)

// snapshotsPart is where the snapshots lie in a pack: snapshots/<id>/<file>.
const snapshotsPart = "snapshots/"

// Pack asks for a snapshot with all it needs in one file.
type Pack struct {
	Snapshot    string // reference
	WithSecrets bool   // also if its memory may hold secrets
	Writer      string // forkd's version, for the record
}

// imageMover is an image store whose images can go elsewhere and come from there.
type imageMover interface {
	Parts(id string) ([]image.Part, error)
	Receive() (image.Receiver, error)
}

func (s *Service) mover() (imageMover, error) {
	m, ok := s.cfg.Images.(imageMover)
	if !ok {
		return nil, errdefs.New(errdefs.ErrUnsupported, "this image store keeps its images to itself")
	}
	return m, nil
}

// Pack writes a pack to w. Nothing is written before everything was read once and is
// known to be there; an error after that leaves half a pack, which no reader takes.
func (s *Service) Pack(ctx context.Context, p Pack, w io.Writer, progress Progress) error {
	if progress == nil {
		progress = func(string, float64) {}
	}
	ctx, done, err := s.begin(ctx)
	if err != nil {
		return err
	}
	defer done()
	if err := s.pack(ctx, p, w, progress); err != nil {
		return fmt.Errorf("pack snapshot %s: %w", p.Snapshot, err)
	}
	return nil
}

func (s *Service) pack(ctx context.Context, p Pack, w io.Writer, progress Progress) error {
	mover, err := s.mover()
	if err != nil {
		return err
	}
	id, tag, err := s.resolveSnapshot(ctx, p.Snapshot)
	if err != nil {
		return err
	}
	release, err := s.cfg.Store.Lease(id, callHolder)
	if err != nil {
		return err
	}
	defer release()
	chain, err := s.cfg.Store.Chain(id)
	if err != nil {
		return err
	}
	last := chain[len(chain)-1]
	if status, why := s.status(ctx, last); status == SnapshotFailed {
		return notReady(id, status, why)
	}
	m := packfile.Manifest{CreatedAt: time.Now(), Writer: p.Writer, Snapshot: id, Tag: tag}
	for _, link := range chain {
		m.HoldsSecrets = m.HoldsSecrets || link.HoldsSecrets
	}
	if err := checkSecrets("snapshot "+id, m.HoldsSecrets, p.WithSecrets); err != nil {
		return err
	}
	if m.Tag == "" {
		m.Tag = s.tagFor(ctx, last)
	}
	keep, err := s.useImage(last.Image.ID)
	if err != nil {
		return err
	}
	defer keep()
	parts, err := mover.Parts(last.Image.ID)
	if err != nil {
		return err
	}
	return writePack(ctx, w, m, append(parts, s.snapshotParts(chain)...), progress)
}

// tagFor is the tag that a pack of m proposes: not one that was made up.
func (s *Service) tagFor(ctx context.Context, m snapshot.Manifest) string {
	tags, err := s.tagsByID(ctx)
	if err != nil {
		return ""
	}
	for _, t := range tags[m.ID] {
		if t != m.Labels[labelAutoTag] {
			return t
		}
	}
	return ""
}

// snapshotParts lists the files of a chain, manifests first.
func (s *Service) snapshotParts(chain []snapshot.Manifest) []image.Part {
	var out []image.Part
	for _, m := range chain {
		names := []string{snapshot.ManifestName}
		for _, a := range m.Artifacts {
			names = append(names, a.Name)
		}
		for _, name := range names {
			out = append(out, image.Part{Name: snapshotsPart + m.ID + "/" + name, Path: filepath.Join(s.cfg.Store.Dir(m.ID), name)})
		}
	}
	return out
}

func writePack(ctx context.Context, w io.Writer, m packfile.Manifest, parts []image.Part, progress Progress) error {
	open := func(name string) (packfile.Content, error) {
		i := slices.IndexFunc(parts, func(p image.Part) bool { return p.Name == name })
		return openContent(parts[i].Path)
	}
	for i, p := range parts {
		progress("reading "+p.Name, float64(i)/float64(2*len(parts)))
		f, err := scanPart(ctx, p)
		if err != nil {
			return err
		}
		m.Files = append(m.Files, f)
	}
	written, total := 0, 2*len(parts)
	return packfile.Write(ctx, w, m, func(name string) (packfile.Content, error) {
		progress("writing "+name, float64(len(parts)+written)/float64(total))
		written++
		return open(name)
	})
}

func scanPart(ctx context.Context, p image.Part) (packfile.File, error) {
	c, err := openContent(p.Path)
	if err != nil {
		return packfile.File{}, err
	}
	defer c.Close()
	st, err := c.Stat()
	if err != nil {
		return packfile.File{}, fmt.Errorf("read %s: %w", p.Name, err)
	}
	return packfile.Scan(ctx, p.Name, c, st.Size())
}

// content is a file with its holes.
type content struct{ *os.File }

func openContent(path string) (content, error) {
	f, err := os.Open(path)
	if err != nil {
		return content{}, errdefs.As(errdefs.ErrCorrupt, err)
	}
	return content{f}, nil
}

func (c content) NextData(off int64) (start, end int64, ok bool, err error) {
	return linux.NextData(c.File, off)
}

// checkForeign looks at the files of a snapshot that came from elsewhere.
func (s *Service) checkForeign(m snapshot.Manifest, dir string) error {
	c, ok := s.cfg.Engine.(engine.StateChecker)
	if !ok || m.Compat.Engine != s.cfg.Engine.Name() {
		return nil // it cannot be restored here
	}
	st := engine.State{ID: m.ID, Dir: dir}
	for _, a := range m.Artifacts {
		st.Artifacts = append(st.Artifacts, a.Artifact)
	}
	return c.CheckState(st, m.Shape)
}
