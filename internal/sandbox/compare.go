package sandbox

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"slices"
	"strings"
	"unicode/utf8"

	"github.com/aymanbagabas/go-udiff"
	"golang.org/x/sync/errgroup"

	"forkd.dev/forkd/internal/agentwire"
	"forkd.dev/forkd/internal/errdefs"
)

// Bounds of a comparison. What is over them is told as such.
const (
	maxChanges    = 20_000
	maxListBytes  = 64 << 20 // of the names of one side
	maxDigestFile = 4 << 30
	maxPatchFile  = 256 << 10 // of one file
	maxPatch      = 2 << 20   // of all
	maxNameBytes  = 4 << 20   // of the names of all changes
	maxPatchLines = 20_000    // of one file: the time of a diff grows with them
)

// Type bits of a file's mode (inode(7)).
const (
	modeType = 0o170000
	modeFile = 0o100000
	modeDir  = 0o040000
	modeLink = 0o120000
)

// looker is what a comparison needs of a guest: *guest.Inspector.
type looker interface {
	Walk(each func(agentwire.FileEntry) error) error
	Digest(path string, limit int64) ([sha256.Size]byte, error)
	Content(path string, limit int64) ([]byte, error)
	Processes() ([]agentwire.ProcessEntry, agentwire.MemoryTotals, error)
}

// Change is a file that differs.
type Change struct {
	Path string
	Kind ChangeKind
	Type string   // file, dir, link or other; of the newer one
	What []string // for a changed one: type, content, mode, owner, target
	// SizeA and SizeB are bytes; 0 where there is no file.
	SizeA, SizeB int64
}

// ChangeKind is what became of a file.
type ChangeKind string

// The kinds of changes.
const (
	Added   ChangeKind = "added"
	Removed ChangeKind = "removed"
	Changed ChangeKind = "changed"
)

// comparison compares the files of two guests. Everything they say is doubted: a path
// counts once, sizes and numbers are bounded by whoever read them.
type comparison struct {
	ctx      context.Context
	a, b     looker
	exclude  []string // path prefixes
	progress Progress

	changes   []Change
	truncated bool // there were more
	unsure    []pair

	filesA, filesB, nameBytes int
}

// pair is a file of both sides.
type pair struct{ a, b agentwire.FileEntry }

func (c *comparison) run() error {
	c.progress("listing files", -1)
	var inA, inB map[string]agentwire.FileEntry
	var g errgroup.Group
	g.Go(func() (err error) { inA, err = c.list(c.a); return err })
	g.Go(func() (err error) { inB, err = c.list(c.b); return err })
	if err := g.Wait(); err != nil {
		return err
	}
	c.filesA, c.filesB = len(inA), len(inB)
	for path, b := range inB {
		a, both := inA[path]
		if !both {
			c.add(Change{Path: path, Kind: Added, Type: typeOf(b.Mode), SizeB: sizeOf(b)})
			continue
		}
		delete(inA, path)
		c.compare(pair{a, b})
	}
	for path, a := range inA {
		c.add(Change{Path: path, Kind: Removed, Type: typeOf(a.Mode), SizeA: sizeOf(a)})
	}
	if err := c.digests(); err != nil {
		return err
	}
	slices.SortFunc(c.changes, func(x, y Change) int { return strings.Compare(x.Path, y.Path) })
	return nil
}

func (c *comparison) list(l looker) (map[string]agentwire.FileEntry, error) {
	files, total := map[string]agentwire.FileEntry{}, 0
	err := l.Walk(func(f agentwire.FileEntry) error {
		if total += len(f.Path) + len(f.Target); total > maxListBytes {
			return errdefs.New(errdefs.ErrResourceExhausted, "the names of its files have more than %d bytes", maxListBytes)
		}
		if !c.excluded(f.Path) {
			files[f.Path] = f
		}
		return c.ctx.Err()
	})
	return files, err
}

func (c *comparison) excluded(path string) bool {
	return slices.ContainsFunc(c.exclude, func(dir string) bool {
		return path == dir || strings.HasPrefix(path, dir) && path[len(dir)] == '/'
	})
}

func (c *comparison) add(ch Change) {
	c.nameBytes += len(ch.Path)
	if len(c.changes) == maxChanges || c.nameBytes > maxNameBytes {
		c.truncated = true
		return
	}
	c.changes = append(c.changes, ch)
}

// compare decides by what lstat says. Same size and other times leave it to the
// content.
func (c *comparison) compare(p pair) {
	if p.a.Mode&modeType == modeFile && p.b.Mode&modeType == modeFile && p.a.Size == p.b.Size &&
		(p.a.MTime != p.b.MTime || p.a.CTime != p.b.CTime || p.a.Inode != p.b.Inode) {
		c.unsure = append(c.unsure, p)
		return
	}
	c.judge(p, p.a.Size != p.b.Size)
}

// judge notes p if anything about it differs.
func (c *comparison) judge(p pair, content bool) {
	var what []string
	note := func(differs bool, name string) {
		if differs {
			what = append(what, name)
		}
	}
	sameType := p.a.Mode&modeType == p.b.Mode&modeType
	note(!sameType, "type")
	note(sameType && p.b.Mode&modeType == modeFile && content, "content")
	note(p.a.Mode&0o7777 != p.b.Mode&0o7777, "mode")
	note(p.a.UID != p.b.UID || p.a.GID != p.b.GID, "owner")
	note(p.a.Target != p.b.Target, "target")
	if len(what) > 0 {
		c.add(Change{Path: p.b.Path, Kind: Changed, Type: typeOf(p.b.Mode), What: what, SizeA: sizeOf(p.a), SizeB: sizeOf(p.b)})
	}
}

// digests compares the content of the files of which only the times differ.
func (c *comparison) digests() error {
	slices.SortFunc(c.unsure, func(x, y pair) int { return strings.Compare(x.a.Path, y.a.Path) })
	for i, p := range c.unsure {
		if err := c.ctx.Err(); err != nil {
			return err
		}
		if i%100 == 0 {
			c.progress(fmt.Sprintf("comparing the content of %d files", len(c.unsure)), float64(i)/float64(len(c.unsure)))
		}
		same, err := c.sameContent(p)
		if err != nil {
			return err
		}
		c.judge(p, !same)
	}
	return nil
}

// sameContent counts what cannot be read, or is too large to, as different.
func (c *comparison) sameContent(p pair) (bool, error) {
	if p.a.Size == 0 {
		return true, nil
	}
	var a, b [sha256.Size]byte
	var g errgroup.Group
	g.Go(func() (err error) { a, err = c.a.Digest(p.a.Path, maxDigestFile); return err })
	g.Go(func() (err error) { b, err = c.b.Digest(p.b.Path, maxDigestFile); return err })
	err := g.Wait()
	switch errdefs.Class(err) {
	case nil:
		return a == b, nil
	case errdefs.ErrNotFound, errdefs.ErrInvalid, errdefs.ErrResourceExhausted, errdefs.ErrPermission:
		return false, nil
	}
	return false, err
}

func typeOf(mode uint32) string {
	switch mode & modeType {
	case modeFile:
		return "file"
	case modeDir:
		return "dir"
	case modeLink:
		return "link"
	}
	return "other"
}

func sizeOf(f agentwire.FileEntry) int64 {
	if f.Mode&modeType != modeFile {
		return 0
	}
	return f.Size
}

// patch is a unified diff of the text files that differ; skipped counts the files it
// has no room for or that are no text.
func (c *comparison) patch() (text string, skipped int, err error) {
	var out strings.Builder
	for i, ch := range c.changes {
		if ch.Type != "file" || ch.Kind == Changed && !slices.Contains(ch.What, "content") {
			continue
		}
		if i%20 == 0 {
			c.progress("reading what differs", float64(i)/float64(len(c.changes)))
		}
		if err := c.ctx.Err(); err != nil {
			return "", 0, err
		}
		piece, ok, err := c.patchOf(ch)
		if err != nil {
			return "", 0, err
		}
		if !ok || out.Len()+len(piece) > maxPatch {
			skipped++
			continue
		}
		out.WriteString(piece)
	}
	return out.String(), skipped, nil
}

func (c *comparison) patchOf(ch Change) (string, bool, error) {
	if ch.SizeA > maxPatchFile || ch.SizeB > maxPatchFile {
		return "", false, nil
	}
	nameA, nameB := "a"+ch.Path, "b"+ch.Path
	var a, b []byte
	var err error
	if ch.Kind != Added {
		a, err = c.a.Content(ch.Path, maxPatchFile)
	} else {
		nameA = "/dev/null"
	}
	if err == nil && ch.Kind != Removed {
		b, err = c.b.Content(ch.Path, maxPatchFile)
	} else if err == nil {
		nameB = "/dev/null"
	}
	switch errdefs.Class(err) {
	case nil:
	case errdefs.ErrNotFound, errdefs.ErrInvalid, errdefs.ErrResourceExhausted, errdefs.ErrPermission:
		return "", false, nil
	default:
		return "", false, err
	}
	if !isText(a) || !isText(b) || strings.ContainsAny(ch.Path, "\n\r") || !utf8.ValidString(ch.Path) {
		return "", false, nil
	}
	return udiff.Unified(nameA, nameB, string(a), string(b)), true, nil
}

func isText(b []byte) bool {
	return !bytes.ContainsRune(b, 0) && utf8.Valid(b) && bytes.Count(b, []byte{'\n'}) <= maxPatchLines
}

// processes compares what runs, by name and arguments.
func (c *comparison) processes(d *Diff) error {
	listA, memoryA, errA := c.a.Processes()
	listB, memoryB, errB := c.b.Processes()
	if err := errors.Join(errA, errB); err != nil {
		return err
	}
	d.A.Memory, d.B.Memory = memoryA, memoryB
	d.A.Processes, d.B.Processes = len(listA), len(listB)
	d.ProcessesRemoved, d.ProcessesAdded = without(listA, listB), without(listB, listA)
	return nil
}

// without returns the processes of list that are not in other, by pid and command.
// Threads of the kernel, which come and go, are left out.
func without(list, other []agentwire.ProcessEntry) []agentwire.ProcessEntry {
	type key struct {
		pid     int
		command string
	}
	there := make(map[key]bool, len(other))
	for _, p := range other {
		there[key{p.PID, p.Command}] = true
	}
	out := []agentwire.ProcessEntry{}
	for _, p := range list {
		if p.Command != "" && !there[key{p.PID, p.Command}] {
			out = append(out, p)
		}
	}
	slices.SortFunc(out, func(x, y agentwire.ProcessEntry) int { return x.PID - y.PID })
	return out
}
