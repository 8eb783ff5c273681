package metadata

import (
	"encoding/json"
	"fmt"
	"reflect"
	"testing"
	"time"

	"forkd.dev/forkd/internal/engine"
	"forkd.dev/forkd/internal/errdefs"
	"forkd.dev/forkd/internal/ident"
)

func full() Sandbox {
	return Sandbox{
		ID: ident.New(ident.Sandbox), Name: "box", State: "running", Reason: "r", SnapshotID: ident.New(ident.Snapshot),
		SnapshotTag: "py-base", Engine: "qemu", Isolation: engine.IsolationEmulated,
		Shape: engine.Shape{CPUs: 2, MemoryMiB: 512, DiskMiB: 4096}, Labels: map[string]string{"a": "1", "b/c": "x'\"%"},
		CreatedAt: time.Unix(5, 6).UTC(), MemoryLimitMiB: 7, CPULimitPercent: 9, PIDsLimit: 10, BranchCount: 8, Batch: "batch", Session: "session",
		HoldsSecrets: true, VerdictOwed: "source", MachineID: "m", RestoredID: "k", Receipt: json.RawMessage(`{"x":1}`), Timing: json.RawMessage(`{"y":2}`), Schedule: json.RawMessage(`{"z":3}`),
	}
}

func TestSandboxRoundTrip(t *testing.T) {
	d := openIn(t, t.TempDir())
	want := full()
	v := reflect.ValueOf(want)
	for i := range v.NumField() {
		if name := v.Type().Field(i).Name; name != "EndedAt" && v.Field(i).IsZero() {
			t.Fatalf("full() does not fill %s", name)
		}
	}
	if err := d.InsertSandboxes(t.Context(), []Sandbox{want}); err != nil {
		t.Fatal(err)
	}
	check := func() {
		t.Helper()
		if got, err := d.GetSandbox(t.Context(), want.ID); err != nil || !reflect.DeepEqual(got, want) {
			t.Errorf("got %+v (%v), want %+v", got, err, want)
		}
	}
	check()
	want = Sandbox{ID: want.ID, State: "failed", EndedAt: time.Unix(9, 0).UTC()}
	if err := d.UpdateSandbox(t.Context(), want); err != nil {
		t.Fatal(err)
	}
	check()
	if err := d.DeleteSandboxes(t.Context(), want.ID, "sb-none"); err != nil {
		t.Fatal(err)
	}
	_, err := d.GetSandbox(t.Context(), want.ID)
	wantClass(t, err, errdefs.ErrNotFound)
	wantClass(t, d.UpdateSandbox(t.Context(), want), errdefs.ErrNotFound)
}

func TestSandboxConflicts(t *testing.T) {
	d := openIn(t, t.TempDir())
	first, second := full(), full()
	if err := d.InsertSandboxes(t.Context(), []Sandbox{first}); err != nil {
		t.Fatal(err)
	}
	wantClass(t, d.InsertSandboxes(t.Context(), []Sandbox{first}), errdefs.ErrConflict)
	other := full()
	other.Name = ""
	wantClass(t, d.InsertSandboxes(t.Context(), []Sandbox{other, second}), errdefs.ErrConflict)
	if all, err := d.ListSandboxes(t.Context(), SandboxFilter{}); err != nil || len(all) != 1 {
		t.Errorf("a failed insert left %d sandboxes (%v)", len(all), err)
	}
	first.EndedAt = time.Unix(7, 0)
	if err := d.UpdateSandbox(t.Context(), first); err != nil {
		t.Fatal(err)
	}
	if err := d.InsertSandboxes(t.Context(), []Sandbox{second}); err != nil {
		t.Errorf("the name of an ended sandbox is not free: %v", err)
	}
	first.EndedAt = time.Time{}
	wantClass(t, d.UpdateSandbox(t.Context(), first), errdefs.ErrConflict)
}

func TestListSandboxes(t *testing.T) {
	d := openIn(t, t.TempDir())
	var all []Sandbox
	for i := range 6 {
		s := Sandbox{
			ID: fmt.Sprintf("sb%d%019d", i, 0), State: "running", SnapshotID: fmt.Sprint("sn", i%2), Batch: fmt.Sprint("batch", i/3),
			Labels: map[string]string{"i": fmt.Sprint(i), "half": fmt.Sprint(i / 3)}, CreatedAt: time.Unix(int64(100-i), 0),
		}
		if i == 5 {
			s.State, s.EndedAt, s.Name, s.Session = "failed", time.Unix(500, 0), "five", "s"
		}
		all = append(all, s)
	}
	if err := d.InsertSandboxes(t.Context(), all); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		filter SandboxFilter
		want   string // oldest first
	}{
		{SandboxFilter{}, "543210"},
		{SandboxFilter{Life: Living}, "43210"},
		{SandboxFilter{Life: Ended}, "5"},
		{SandboxFilter{IDPrefix: "sb3"}, "3"},
		{SandboxFilter{IDPrefix: "sb%"}, ""},
		{SandboxFilter{Name: "five"}, "5"},
		{SandboxFilter{Session: "s"}, "5"},
		{SandboxFilter{SnapshotID: "sn1"}, "531"},
		{SandboxFilter{Batch: "batch0", SnapshotID: "sn0"}, "20"},
		{SandboxFilter{States: []string{"failed", "lost"}}, "5"},
		{SandboxFilter{Labels: map[string]string{"half": "1", "i": "4"}}, "4"},
		{SandboxFilter{Labels: map[string]string{"none": ""}}, ""},
		{SandboxFilter{Batch: "' OR 1=1 --"}, ""},
	} {
		found, err := d.ListSandboxes(t.Context(), c.filter)
		got := ""
		for _, s := range found {
			got += s.ID[2:3]
		}
		if err != nil || got != c.want {
			t.Errorf("%+v: got %q (%v), want %q", c.filter, got, err, c.want)
		}
	}
	for _, c := range []struct {
		before int64
		want   int
	}{{500, 0}, {501, 1}} {
		if ids, err := d.PruneEnded(t.Context(), time.Unix(c.before, 0)); err != nil || len(ids) != c.want {
			t.Errorf("prune before %d: %v (%v), want %d", c.before, ids, err, c.want)
		}
	}
	if left, err := d.ListSandboxes(t.Context(), SandboxFilter{Life: Ended}); err != nil || len(left) != 0 {
		t.Errorf("after prune: %v %v", left, err)
	}
}

func TestSnapshotsAndTags(t *testing.T) {
	d, ctx := openIn(t, t.TempDir()), t.Context()
	a := Snapshot{ID: ident.New(ident.Snapshot), Status: "building", Dir: "d", CreatedAt: time.Unix(1, 0).UTC()}
	b := Snapshot{ID: ident.New(ident.Snapshot), Status: "ready", CreatedAt: time.Unix(2, 0).UTC()}
	if err := d.PutSnapshot(ctx, a); err != nil {
		t.Fatal(err)
	}
	a.Status, a.Dir, a.Reason = "ready", "", "because"
	if err := d.PublishSnapshot(ctx, a, "tag", KeepTag); err != nil {
		t.Fatal(err)
	}
	if got, err := d.GetSnapshot(ctx, a.ID); err != nil || got != a {
		t.Errorf("got %+v (%v), want %+v", got, err, a)
	}
	wantClass(t, d.PublishSnapshot(ctx, b, "tag", KeepTag), errdefs.ErrConflict)
	_, err := d.GetSnapshot(ctx, b.ID)
	wantClass(t, err, errdefs.ErrNotFound) // refused as a whole
	if err := d.PublishSnapshot(ctx, b, "tag", MoveTag); err != nil {
		t.Fatal(err)
	}
	if got, err := d.FindTag(ctx, "tag", ""); err != nil || got.SnapshotID != b.ID {
		t.Errorf("tag is %+v (%v)", got, err)
	}
	wantClass(t, d.SetTag(ctx, "tag", a.ID, KeepTag), errdefs.ErrConflict)
	wantClass(t, d.SetTag(ctx, "new", ident.New(ident.Snapshot), KeepTag), errdefs.ErrNotFound)
	wantClass(t, d.SetTag(ctx, a.ID, a.ID, KeepTag), errdefs.ErrInvalid)
	wantClass(t, d.SetTag(ctx, "../../etc", a.ID, KeepTag), errdefs.ErrInvalid)
	for _, tag := range []string{"tag", "second", "second"} {
		if err := d.SetTag(ctx, tag, b.ID, KeepTag); err != nil {
			t.Error(err)
		}
	}
	if err := d.SetTag(ctx, "third", a.ID, KeepTag); err != nil {
		t.Error(err)
	}
	wantClass(t, d.DeleteTag(ctx, Tag{"second", "", a.ID}), errdefs.ErrNotFound)
	if err := d.DeleteTag(ctx, Tag{"second", "", b.ID}); err != nil {
		t.Error(err)
	}
	wantClass(t, d.DeleteTag(ctx, Tag{"second", "", b.ID}), errdefs.ErrNotFound)
	tags, err := d.Tags(ctx)
	if err != nil || !reflect.DeepEqual(tags, []Tag{{"tag", "", b.ID}, {"third", "", a.ID}}) {
		t.Errorf("tags %v (%v)", tags, err)
	}
	if err := d.DeleteSnapshot(ctx, b.ID); err != nil {
		t.Fatal(err)
	}
	wantClass(t, d.DeleteSnapshot(ctx, b.ID), errdefs.ErrNotFound)
	_, err = d.FindTag(ctx, "tag", "")
	wantClass(t, err, errdefs.ErrNotFound)
	if all, err := d.ListSnapshots(ctx); err != nil || !reflect.DeepEqual(all, []Snapshot{a}) {
		t.Errorf("snapshots %+v (%v)", all, err)
	}
}

// TestTagsOfEngines: each engine has its own, and a look finds another's only where
// there is none.
func TestTagsOfEngines(t *testing.T) {
	d, ctx := openIn(t, t.TempDir()), t.Context()
	one, two := Snapshot{ID: ident.New(ident.Snapshot), Engine: "one"}, Snapshot{ID: ident.New(ident.Snapshot), Engine: "two"}
	for _, s := range []Snapshot{one, two} {
		if err := d.PublishSnapshot(ctx, s, "both", KeepTag); err != nil {
			t.Fatal(err)
		}
	}
	if err := d.SetTag(ctx, "only", one.ID, KeepTag); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct{ engine, tag, want string }{
		{"one", "both", one.ID}, {"two", "both", two.ID}, {"three", "both", one.ID}, {"two", "only", one.ID},
	} {
		if got, err := d.FindTag(ctx, c.tag, c.engine); err != nil || got.SnapshotID != c.want {
			t.Errorf("%s means %+v to %s (%v), want %s", c.tag, got, c.engine, err, c.want)
		}
	}
	// An update that does not know the engine keeps it.
	one.Status, one.Engine = "failed", ""
	if err := d.PutSnapshot(ctx, one); err != nil {
		t.Fatal(err)
	}
	if got, err := d.GetSnapshot(ctx, one.ID); err != nil || got.Engine != "one" {
		t.Errorf("row %+v (%v)", got, err)
	}
	if err := d.DeleteTag(ctx, Tag{"both", "one", one.ID}); err != nil {
		t.Fatal(err)
	}
	if got, err := d.FindTag(ctx, "both", "one"); err != nil || got.SnapshotID != two.ID {
		t.Errorf("the other engine's is %+v (%v)", got, err)
	}
}

func TestLeases(t *testing.T) {
	d, ctx := openIn(t, t.TempDir()), t.Context()
	s := Snapshot{ID: ident.New(ident.Snapshot)}
	wantClass(t, d.AddLease(ctx, s.ID, "h"), errdefs.ErrNotFound)
	if err := d.PutSnapshot(ctx, s); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if err := d.AddLease(ctx, s.ID, "h"); err != nil {
			t.Fatal(err)
		}
	}
	wantClass(t, d.DeleteSnapshot(ctx, s.ID), errdefs.ErrConflict)
	if got, err := d.Leases(ctx); err != nil || !reflect.DeepEqual(got, []Lease{{s.ID, "h"}}) {
		t.Errorf("leases %v (%v)", got, err)
	}
	for range 2 {
		if err := d.DropLease(ctx, s.ID, "h"); err != nil {
			t.Fatal(err)
		}
	}
	if err := d.DeleteSnapshot(ctx, s.ID); err != nil {
		t.Error(err)
	}
}

func TestBuilds(t *testing.T) {
	d, ctx := openIn(t, t.TempDir()), t.Context()
	b := Build{ID: "b1", Kind: "image", Target: "python", State: "running", Step: "unpack", StartedAt: time.Unix(3, 0).UTC()}
	if err := d.PutBuild(ctx, b); err != nil {
		t.Fatal(err)
	}
	b.State, b.Error, b.EndedAt = "failed", "no network", time.Unix(4, 0).UTC()
	if err := d.PutBuild(ctx, b); err != nil {
		t.Fatal(err)
	}
	if got, err := d.Builds(ctx); err != nil || !reflect.DeepEqual(got, []Build{b}) {
		t.Errorf("builds %+v (%v)", got, err)
	}
	if err := d.DeleteBuild(ctx, "b1"); err != nil {
		t.Error(err)
	}
	wantClass(t, d.DeleteBuild(ctx, "b1"), errdefs.ErrNotFound)
}
