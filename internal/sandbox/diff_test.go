package sandbox

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"forkd.dev/forkd/internal/agentwire"
	"forkd.dev/forkd/internal/engine/fake"
	"forkd.dev/forkd/internal/errdefs"
)

// TestDiff compares snapshots, checkpoints and running sandboxes, which it leaves as
// they are, and leaves nothing.
func TestDiff(t *testing.T) {
	w := newWorld(t, nil)
	w.base()
	id := w.fork("base", 1)[0].ID
	w.exec(id, "write", "/new", "hello")
	w.exec(id, "write", "/tmp/noise", "x")
	point := must(w.svc.Checkpoint(w.ctx(), id, Checkpoint{Sync: true})).Snapshot.ID
	w.exec(id, "write", "/data", "changed")
	w.exec(id, "write", "/new", "world") // of the same size
	diff := func(a, b string, more ...string) string {
		t.Helper()
		d := must(w.svc.Diff(w.ctx(), DiffRequest{A: a, B: b, Patch: true, Exclude: append(more, "/tmp")}, nil))
		var out []string
		for _, c := range d.Changes {
			out = append(out, fmt.Sprint(c.Kind, " ", c.Path, " ", strings.Join(c.What, ","), " ", c.SizeA, " ", c.SizeB))
		}
		if d.A.Processes != 1 || d.B.Memory.TotalKiB == 0 || len(d.ProcessesAdded) > 0 {
			t.Errorf("processes and memory: %+v", d)
		}
		if strings.Contains(d.Patch, "+world") != slices.ContainsFunc(out, func(s string) bool { return strings.Contains(s, "/new") && strings.Contains(b, id) }) {
			t.Errorf("the patch is\n%s", d.Patch)
		}
		return strings.Join(out, "; ")
	}
	for _, c := range []struct{ a, b, want string }{
		{"base", point, "added /new  0 5"},
		{point, "base", "removed /new  5 0"},
		{point, id, "changed /data content 9 7; changed /new content 5 5"},
		{point, point[:8], ""},
		{id, id, ""},
		{"base", id, "changed /data content 9 7; added /new  0 5"},
	} {
		if got := diff(c.a, c.b); got != c.want {
			t.Errorf("diff %.8s %.8s is %q, want %q", c.a, c.b, got, c.want)
		}
	}
	if got := diff("base", id, "/new"); got != "changed /data content 9 7" {
		t.Errorf("without /new: %q", got)
	}
	if got := w.exec(id, "cat", "/data"); got != "changed" {
		t.Errorf("the sandbox has %q", got)
	}
	if all := must(w.svc.Snapshots(w.ctx())); len(all) != 2 {
		t.Errorf("left are %+v", all)
	}
	_, err := w.svc.Diff(w.ctx(), DiffRequest{A: "base", B: "none"}, nil)
	w.wantClass(err, errdefs.ErrNotFound)
	_, err = w.svc.Diff(w.ctx(), DiffRequest{A: "base", B: "base", Exclude: []string{"tmp/"}}, nil)
	w.wantClass(err, errdefs.ErrInvalid)
	boom := errors.New("boom")
	for _, op := range []fake.Op{fake.OpRestore, fake.OpResume, fake.OpDial} {
		w.script.onFault(func(at fake.Op, machine string) error {
			if at == op && machine != id {
				return boom
			}
			return nil
		})
		if _, err := w.svc.Diff(w.ctx(), DiffRequest{A: "base", B: point}, nil); !errors.Is(err, boom) {
			t.Errorf("%s: error is %v", op, err)
		}
		w.script.onFault(nil)
	}
	ctx, cancel := context.WithCancel(w.ctx())
	_, err = w.svc.Diff(ctx, DiffRequest{A: "base", B: point}, func(step string, _ float64) {
		if step == "listing files" {
			cancel()
		}
	})
	w.wantClass(err, context.Canceled)
	w.consistent()
}

// files is a guest with some files.
type files struct {
	entries []agentwire.FileEntry
	content map[string]string
	digests int
	broken  error
}

func (f *files) Walk(each func(agentwire.FileEntry) error) error {
	for _, e := range f.entries {
		if err := each(e); err != nil {
			return err
		}
	}
	return f.broken
}

func (f *files) Digest(path string, limit int64) ([sha256.Size]byte, error) {
	f.digests++
	b, err := f.Content(path, limit)
	return sha256.Sum256(b), err
}

func (f *files) Content(path string, limit int64) ([]byte, error) {
	text, ok := f.content[path]
	switch {
	case !ok:
		return nil, errdefs.New(errdefs.ErrNotFound, "there is no %s", path)
	case int64(len(text)) > limit:
		return nil, errdefs.New(errdefs.ErrResourceExhausted, "%s is too large", path)
	}
	return []byte(text), nil
}

func (f *files) Processes() ([]agentwire.ProcessEntry, agentwire.MemoryTotals, error) {
	return nil, agentwire.MemoryTotals{}, nil
}

func (f *files) add(path, text string, change func(*agentwire.FileEntry)) {
	e := agentwire.FileEntry{Path: path, Mode: modeFile | 0o644, Size: int64(len(text)), MTime: 1, CTime: 1, Inode: 1}
	if change != nil {
		change(&e)
	}
	f.entries = append(f.entries, e)
	f.content[path] = text
}

func compared(t *testing.T, a, b *files) *comparison {
	t.Helper()
	c := &comparison{ctx: t.Context(), a: a, b: b, exclude: alwaysExcluded, progress: func(string, float64) {}}
	if err := c.run(); err != nil {
		t.Fatal(err)
	}
	return c
}

// TestCompare: what differs, and what costs reading a file.
func TestCompare(t *testing.T) {
	touched := func(e *agentwire.FileEntry) { e.MTime, e.CTime = 9, 9 }
	for _, c := range []struct {
		name           string
		a, b           string
		changeA, ofB   func(*agentwire.FileEntry)
		want           string
		digests        int
		missingContent bool
	}{
		{name: "same", a: "x", b: "x"},
		{name: "touched", a: "x", b: "x", ofB: touched, digests: 1},
		{name: "content of one size", a: "x", b: "y", ofB: touched, want: "content", digests: 1},
		{name: "size", a: "x", b: "xy", want: "content"},
		{name: "empty", ofB: touched},
		{name: "mode", a: "x", b: "x", ofB: func(e *agentwire.FileEntry) { e.Mode = modeFile | 0o4755 }, want: "mode"},
		{name: "mode and content", a: "x", b: "y", ofB: func(e *agentwire.FileEntry) { touched(e); e.Mode = modeFile | 0o600 }, want: "content,mode", digests: 1},
		{name: "owner", a: "x", b: "x", ofB: func(e *agentwire.FileEntry) { e.GID = 5 }, want: "owner"},
		{name: "type", a: "x", b: "x", ofB: func(e *agentwire.FileEntry) { e.Mode, e.Target = modeLink|0o644, "x" }, want: "type,target"},
		{name: "directory with other times", ofB: func(e *agentwire.FileEntry) { e.Mode, e.CTime = modeDir|0o644, 9 },
			changeA: func(e *agentwire.FileEntry) { e.Mode = modeDir | 0o644 }},
		{name: "cannot be read", a: "x", b: "x", ofB: touched, want: "content", digests: 1, missingContent: true},
	} {
		a, b := &files{content: map[string]string{}}, &files{content: map[string]string{}}
		a.add("/f", c.a, c.changeA)
		b.add("/f", c.b, c.ofB)
		if c.missingContent {
			b.content = nil
		}
		got := ""
		r := compared(t, a, b)
		for _, ch := range r.changes {
			got += strings.Join(ch.What, ",")
		}
		if got != c.want || a.digests != c.digests {
			t.Errorf("%s: %q with %d digests, want %q with %d", c.name, got, a.digests, c.want, c.digests)
		}
	}
}

// TestCompareIsBounded: a guest with many files, twice the same path, or names that
// are no text, neither takes the host's memory nor breaks the patch.
func TestCompareIsBounded(t *testing.T) {
	a, b := &files{content: map[string]string{}}, &files{content: map[string]string{}}
	for i := range maxChanges + 10 {
		b.add(fmt.Sprintf("/many/%d", i), "", nil)
	}
	if c := compared(t, a, b); len(c.changes) != maxChanges || !c.truncated {
		t.Errorf("%d changes, truncated %v", len(c.changes), c.truncated)
	}
	b = &files{content: map[string]string{}}
	b.add("/proc/1", "x", nil)
	b.add("/process", "x\n", nil)
	b.add("/process", "x\n", nil)
	b.add("/line\nend", "x", nil)
	b.add("/\xff", "x", nil)
	b.add("/binary", "\x00", nil)
	b.add("/large", strings.Repeat("x", maxPatchFile+1), nil)
	b.add("/lines", strings.Repeat("\n", maxPatchLines+1), nil)
	c := compared(t, a, b)
	patch, skipped, err := c.patch()
	if err != nil || skipped != 5 || len(c.changes) != 6 || patch != "--- /dev/null\n+++ b/process\n@@ -0,0 +1 @@\n+x\n" {
		t.Errorf("%d changes, patch %q, %d skipped, %v", len(c.changes), patch, skipped, err)
	}
	long := strings.Repeat("x", agentwire.MaxInspectPath-8)
	for i := range maxListBytes/len(long) + 2 {
		a.entries = append(a.entries, agentwire.FileEntry{Path: fmt.Sprintf("/%07d%s", i, long)})
	}
	c = &comparison{ctx: t.Context(), a: a, b: b, progress: func(string, float64) {}}
	if err := c.run(); !errors.Is(err, errdefs.ErrResourceExhausted) {
		t.Errorf("endless names: %v", err)
	}
}
