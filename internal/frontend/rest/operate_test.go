package rest

import (
	"context"
	"net/http"
	"strings"
	"testing"
	"time"

	api "forkd.dev/forkd/api/rest"
	"forkd.dev/forkd/internal/errdefs"
	"forkd.dev/forkd/internal/sandbox"
)

func TestPools(t *testing.T) {
	r := newRig(t, nil)
	a := r.do("PUT", "/v1/snapshots/py-base/pool", `{"warm":20}`)
	want := api.Pool{SnapshotID: "sn00000000000000000001", Tags: []string{"py-base"}, Warm: 20, Ready: 20}
	if got := into[api.Pool](t, a); a.status != 200 || got.SnapshotID != want.SnapshotID || got.Warm != 20 || got.Ready != 20 || len(got.Tags) != 1 {
		t.Errorf("set: %d %s", a.status, a.body)
	}
	if list := into[[]api.Pool](t, r.do("GET", "/v1/pools", "")); len(list) != 1 || list[0].Warm != 20 {
		t.Errorf("pools are %+v", list)
	}
	if a := r.do("PUT", "/v1/snapshots/py-base/pool", `{"warm":0}`); a.status != 200 {
		t.Errorf("end: %d %s", a.status, a.body)
	}
	if a := r.do("GET", "/v1/pools", ""); a.body != "[]\n" {
		t.Errorf("pools are %s", a.body)
	}
	a = r.do("PUT", "/v1/snapshots/py-base/pool", `{"warm":2,"blank":3}`)
	if got := into[api.Pool](t, a); a.status != 200 || got.Warm != 2 || got.Blank != 3 || got.BlankReady != 3 {
		t.Errorf("both: %d %s", a.status, a.body)
	}
	a = r.do("PUT", "/v1/snapshots/py-base/pool", `{"blank":-1}`)
	if got := into[api.Pool](t, a); a.status != 200 || got.Warm != 2 || got.Blank != 0 {
		t.Errorf("what is absent stays: %d %s", a.status, a.body)
	}
	for body, status := range map[string]int{`{"blank":-2}`: 400, `{"blank":501}`: 400, `{}`: 422, `{"warm":-1}`: 400, `{"warm":"x"}`: 422, `{"warm":501}`: 400} {
		if a := r.do("PUT", "/v1/snapshots/py-base/pool", body); a.status != status {
			t.Errorf("%s: got %d %s, want %d", body, a.status, a.body, status)
		}
	}
	if a := r.do("PUT", "/v1/snapshots/absent/pool", `{"warm":1}`); a.status != 404 {
		t.Errorf("unknown snapshot: %d %s", a.status, a.body)
	}
}

func TestForkWaitsAndLimits(t *testing.T) {
	r := newRig(t, nil)
	var got sandbox.Fork
	r.svc.OnFork = func(_ context.Context, f sandbox.Fork) error {
		got = f
		return nil
	}
	a := r.do("POST", "/v1/sandboxes?wait=30s", `{"snapshot_tag":"py-base","memory_limit_mib":256,"cpu_limit":1.5,"pids_limit":64}`)
	sb := into[[]api.Sandbox](t, a)
	if a.status != http.StatusCreated || got.Wait != 30*time.Second || got.MemoryLimitMiB != 256 || got.CPULimitPercent != 150 || got.PIDsLimit != 64 {
		t.Errorf("got %d, fork is %+v", a.status, got)
	}
	if len(sb) != 1 || sb[0].CPULimit == nil || *sb[0].CPULimit != 1.5 || sb[0].PIDsLimit == nil || *sb[0].PIDsLimit != 64 {
		t.Errorf("sandbox is %s", a.body)
	}
	if a := r.do("POST", "/v1/sandboxes", `{"snapshot_tag":"py-base","wait":"1m"}`); a.status != http.StatusCreated || got.Wait != time.Minute {
		t.Errorf("wait in the body: %d, %v", a.status, got.Wait)
	}
	for _, body := range []string{`"wait":"soon"`, `"wait":"-1s"`, `"wait":"2h"`, `"cpu_limit":0`, `"cpu_limit":-1`, `"cpu_limit":1e300`, `"pids_limit":0`} {
		if a := r.do("POST", "/v1/sandboxes", `{"snapshot_tag":"py-base",`+body+`}`); a.status != 400 {
			t.Errorf("%s: got %d %s", body, a.status, a.body)
		}
	}
}

// TestFullHost is what a client sees when the host is full.
func TestFullHost(t *testing.T) {
	r := newRig(t, nil)
	r.svc.OnFork = func(context.Context, sandbox.Fork) error {
		return errdefs.WithHint(errdefs.New(errdefs.ErrResourceExhausted, "cannot fork 5 sandboxes: 2 more fit"), "ask for fewer")
	}
	for _, accept := range []string{api.JSON, api.NDJSON} {
		a := r.do("POST", "/v1/sandboxes", `{"snapshot_tag":"py-base","n":5}`, "Accept: "+accept)
		e := into[api.Error](t, a)
		if a.status != 503 || a.header.Get("Retry-After") != "2" || e.Code != "resource_exhausted" || !strings.Contains(e.Error, "2 more fit") || e.Hint != "ask for fewer" {
			t.Errorf("%s: got %d %v %s", accept, a.status, a.header, a.body)
		}
	}
}

func TestStats(t *testing.T) {
	r := newRig(t, nil)
	id := r.fork()
	one := into[api.Stat](t, r.do("GET", "/v1/sandboxes/"+id+"/stats", ""))
	all := into[[]api.Stat](t, r.do("GET", "/v1/stats", ""))
	if len(all) != 1 || all[0] != one {
		t.Errorf("all are %+v, one is %+v", all, one)
	}
	u := one.Usage
	if u.PSSKiB != 24<<10 || u.SharedKiB != 70<<10 || u.PrivateKiB != 20<<10 || u.GuestPagesKiB != 9<<10 || u.LastActivityUnixMS == 0 {
		t.Errorf("usage is %+v", u)
	}
	if a := r.do("GET", "/v1/sandboxes/absent/stats", ""); a.status != 404 {
		t.Errorf("unknown: %d", a.status)
	}
}

func TestLogs(t *testing.T) {
	r := newRig(t, nil)
	id := r.fork()
	a := r.do("GET", "/v1/logs/"+id+"?kind=console", "")
	if a.status != 200 || a.header.Get("Content-Type") != api.Text || a.header.Get("X-Content-Type-Options") != "nosniff" ||
		a.body != "first line of "+id+" (console)\n\x1b[2Jsecond\tline\xff\n" {
		t.Errorf("got %d %v %q", a.status, a.header, a.body)
	}
	if a := r.do("GET", "/v1/logs/absent", ""); a.status != 404 || into[api.Error](t, a).Code != "not_found" {
		t.Errorf("unknown: %d %s", a.status, a.body)
	}
	if a := r.do("GET", "/v1/logs/py-base?follow=perhaps", ""); a.status != 400 {
		t.Errorf("bad flag: %d %s", a.status, a.body)
	}
	r.svc.OnLogs = func(context.Context, sandbox.LogRequest, func([]byte) error) error { return nil }
	if a := r.do("GET", "/v1/logs/py-base", ""); a.status != 200 || a.body != "" {
		t.Errorf("empty: %d %q", a.status, a.body)
	}
}

// TestBrokenLogIsNoWholeLog: an answer that ends early must not look complete.
func TestBrokenLogIsNoWholeLog(t *testing.T) {
	r := newRig(t, nil)
	r.svc.OnLogs = func(_ context.Context, _ sandbox.LogRequest, write func([]byte) error) error {
		if err := write([]byte("begun\n")); err != nil {
			return err
		}
		return errdefs.New(errdefs.ErrInternal, "the disk broke")
	}
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, r.url+"/v1/logs/py-base", nil)
	if err != nil {
		t.Fatal(err)
	}
	client := &http.Client{}
	defer client.CloseIdleConnections()
	res, err := client.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	buf := make([]byte, 100)
	for err == nil {
		_, err = res.Body.Read(buf)
	}
	if err.Error() == "EOF" {
		t.Error("the answer ended as if it were whole")
	}
}
