package main

import (
	"strings"
	"testing"
)

func TestRun(t *testing.T) {
	const in = `{"Action":"start","Package":"forkd.dev/forkd/internal/a"}
{"Action":"output","Package":"forkd.dev/forkd/internal/a","Test":"TestSkip","Output":"=== RUN   TestSkip\n"}
{"Action":"output","Package":"forkd.dev/forkd/internal/a","Test":"TestSkip","Output":"    a_test.go:7: needs root: uid is 5\n"}
{"Action":"output","Package":"forkd.dev/forkd/internal/a","Test":"TestSkip","Output":"--- SKIP: TestSkip (0.00s)\n"}
{"Action":"skip","Package":"forkd.dev/forkd/internal/a","Test":"TestSkip"}
{"Action":"output","Package":"forkd.dev/forkd/internal/a","Test":"TestGood","Output":"    a_test.go:9: measured: 3 apples\n"}
{"Action":"pass","Package":"forkd.dev/forkd/internal/a","Test":"TestGood"}
{"Action":"pass","Package":"forkd.dev/forkd/internal/a","Elapsed":1.5}
`
	for name, c := range map[string]struct {
		more   string
		failed bool
		want   []string
	}{
		"good": {"", false, []string{"measured: internal/a TestGood: 3 apples\n", "skipped: internal/a TestSkip: needs root: uid is 5\n", "1 passed, 0 failed, 1 skipped\n"}},
		"failed test": {`{"Action":"output","Package":"b","Test":"TestBad","Output":"boom\n"}
{"Action":"fail","Package":"b","Test":"TestBad"}
{"Action":"fail","Package":"b"}`, true, []string{"FAILED b TestBad", "boom", "1 passed, 1 failed, 1 skipped\n"}},
		"failed build": {`{"ImportPath":"b","Action":"build-output","Output":"b.go:1: no\n"}
{"Action":"fail","Package":"b","FailedBuild":"b"}`, true, []string{"b.go:1: no", "1 passed, 1 failed, 1 skipped\n"}},
		"died": {`{"Action":"output","Package":"b","Test":"TestHang","Output":"half\n"}`, true, []string{"DID NOT END b TestHang\nhalf"}},
	} {
		var out strings.Builder
		failed, err := run(strings.NewReader(in+c.more), &out)
		if err != nil || failed != c.failed {
			t.Errorf("%s: failed=%v, %v", name, failed, err)
		}
		for _, w := range c.want {
			if !strings.Contains(out.String(), w) {
				t.Errorf("%s: no %q in:\n%s", name, w, out.String())
			}
		}
	}
	if failed, _ := run(strings.NewReader(""), &strings.Builder{}); !failed {
		t.Error("no test output at all counts as success")
	}
}
