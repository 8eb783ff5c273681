package rest

import (
	"net/http"
	"slices"
	"strings"
	"testing"

	api "forkd.dev/forkd/api/rest"
	"forkd.dev/forkd/internal/sandbox"
)

func TestSnapshotLife(t *testing.T) {
	r := newRig(t, nil)
	a := r.do("POST", "/v1/snapshots", `{"tag":"py-data","from":"py-base","exec":["true"],"labels":{"a":"b"}}`)
	sn := into[api.Snapshot](t, a)
	if a.status != http.StatusCreated || sn.Tag != "py-data" || sn.Status != "ready" || !sn.Bootable || sn.Recipe.From != "py-base" {
		t.Fatalf("create: %d %s", a.status, a.body)
	}
	d := into[api.SnapshotDetail](t, r.do("GET", "/v1/snapshots/py-data/info", ""))
	if !slices.Equal(d.Ancestors, []string{"py-base"}) || d.ParentTag != "py-base" || d.ChainDepth != 1 || d.MemoryLogicalBytes != 512<<20 || d.VMStateBytes != 16<<10 {
		t.Errorf("info: %+v", d)
	}
	d = into[api.SnapshotDetail](t, r.do("GET", "/v1/snapshots/py-base/info", ""))
	if !slices.Equal(d.Dependents, []string{"py-data"}) || len(d.Ancestors) != 0 {
		t.Errorf("info of the parent: %+v", d)
	}
	if a := r.do("DELETE", "/v1/snapshots/py-base", ""); a.status != http.StatusConflict || !strings.Contains(a.body, "py-data") {
		t.Errorf("delete with dependents: %d %s", a.status, a.body)
	}
	if a := r.do("PUT", "/v1/tags/second", `{"snapshot":"py-data"}`); a.status != http.StatusNoContent {
		t.Errorf("tag: %d %s", a.status, a.body)
	}
	if a := r.do("PUT", "/v1/tags/second", `{"snapshot":"py-base"}`); a.status != http.StatusConflict {
		t.Errorf("taken tag: %d %s", a.status, a.body)
	}
	if a := r.do("DELETE", "/v1/tags/second", ""); a.status != http.StatusNoContent {
		t.Errorf("untag: %d %s", a.status, a.body)
	}
	if a := r.do("DELETE", "/v1/snapshots/py-data?cascade=true", ""); a.status != http.StatusNoContent {
		t.Errorf("delete: %d %s", a.status, a.body)
	}
}

func TestSnapshotStream(t *testing.T) {
	r := newRig(t, nil)
	a := r.do("POST", "/v1/snapshots", `{"tag":"x","image":"python"}`, "Accept: application/x-ndjson")
	parts := strings.Split(strings.TrimSpace(a.body), "\n")
	if len(parts) != 2 || parts[0] != `{"progress":{"step":"boot","fraction":0.5}}` || !strings.Contains(parts[1], `"done":true,"snapshot":{"tag":"x"`) {
		t.Errorf("stream: %s", a.body)
	}
	a = r.do("POST", "/v1/snapshots", `{"tag":"x"}`, "Accept: application/x-ndjson")
	if !strings.Contains(a.body, `"done":true,"error":"tag \"x\" is taken","code":"conflict","hint":`) {
		t.Errorf("failed stream: %s", a.body)
	}
}

func TestDetailOfDamagedTreeEnds(t *testing.T) {
	a := sandbox.Snapshot{ID: "sna", ParentID: "snb"}
	b := sandbox.Snapshot{ID: "snb", ParentID: "sna"}
	if d := detailOf(a, []sandbox.Snapshot{a, b}); len(d.Ancestors) != 2 {
		t.Errorf("ancestors: %v", d.Ancestors)
	}
}

func TestImages(t *testing.T) {
	r := newRig(t, nil)
	a := r.do("POST", "/v1/images", `{"name":"tools","packages":["git"]}`)
	if im := into[api.Image](t, a); a.status != http.StatusCreated || im.Name != "tools" || !slices.Equal(im.Packages, []string{"git"}) {
		t.Errorf("build: %d %s", a.status, a.body)
	}
	a = r.do("POST", "/v1/images", `{"name":"more"}`, "Accept: application/x-ndjson")
	if !strings.Contains(a.body, `{"progress":{"step":"packages","fraction":0.3}}`) || !strings.Contains(a.body, `"done":true,"image":{`) {
		t.Errorf("stream: %s", a.body)
	}
	if got := into[[]api.Image](t, r.do("GET", "/v1/images", "")); len(got) != 3 {
		t.Errorf("list: %+v", got)
	}
	if a := r.do("DELETE", "/v1/images/tools", ""); a.status != http.StatusNoContent {
		t.Errorf("remove: %d %s", a.status, a.body)
	}
	if a := r.do("GET", "/v1/images/tools", ""); a.status != http.StatusNotFound {
		t.Errorf("get of a removed one: %d", a.status)
	}
}
