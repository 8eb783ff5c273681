package sandbox

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"forkd.dev/forkd/internal/errdefs"
)

func withLogs(t *testing.T) *world {
	dir := filepath.Join(t.TempDir(), "logs")
	return newWorld(t, func(c *Config) { c.LogDir = dir })
}

func (w *world) logs(req LogRequest) (string, error) {
	var buf bytes.Buffer
	err := w.svc.Logs(w.ctx(), req, func(b []byte) error {
		buf.Write(b)
		return nil
	})
	return buf.String(), err
}

func (w *world) logFiles() []string {
	entries, err := os.ReadDir(w.svc.cfg.LogDir)
	if err != nil {
		w.t.Fatal(err)
	}
	var out []string
	for _, e := range entries {
		out = append(out, e.Name())
	}
	return out
}

func TestBuildLog(t *testing.T) {
	w := withLogs(t)
	base := w.base()
	text, err := w.logs(LogRequest{Ref: "base"})
	if err != nil {
		t.Fatal(err)
	}
	for _, part := range []string{"==> booting debian", "==> warming python", "$ write /data from base", "==> capturing"} {
		if !strings.Contains(text, part) {
			t.Errorf("the log does not say %q:\n%s", part, text)
		}
	}
	w.restart()
	if again, err := w.logs(LogRequest{Ref: base.ID, Kind: LogBuild, Follow: true}); err != nil || again != text {
		t.Errorf("after a restart the log is %q, %v", again, err)
	}
	if err := w.svc.DeleteSnapshot(w.ctx(), base.ID, Delete{}); err != nil {
		t.Fatal(err)
	}
	if files := w.logFiles(); len(files) > 0 {
		t.Errorf("logs are left: %v", files)
	}
}

func TestFailedBuildShowsItsLog(t *testing.T) {
	w := withLogs(t)
	_, err := w.svc.CreateSnapshot(w.ctx(), CreateSnapshot{Tag: "bad", Image: "debian", Exec: []string{"echo before it", "exit 3"}}, nil)
	w.wantClass(err, errdefs.ErrInvalid)
	for _, part := range []string{"exit code 3", "last lines of the build log", "$ echo before it\nbefore it\n", "$ exit 3\nexit 3"} {
		if err == nil || !strings.Contains(err.Error(), part) {
			t.Errorf("the error does not say %q: %v", part, err)
		}
	}
	if files := w.logFiles(); len(files) > 0 {
		t.Errorf("logs of a failed build are left: %v", files)
	}
}

func TestImageLog(t *testing.T) {
	w := withLogs(t)
	img, err := w.svc.BuildImage(w.ctx(), BuildImage{Name: "mine"}, nil)
	if err != nil {
		t.Fatal(err)
	}
	if text, err := w.logs(LogRequest{Ref: "mine"}); err != nil || !strings.Contains(text, "==> building") {
		t.Errorf("log of the image is %q, %v", text, err)
	}
	if files := w.logFiles(); len(files) != 1 || files[0] != img.ID+".log" {
		t.Errorf("log files are %v", files)
	}
	if err := w.svc.RemoveImage(w.ctx(), "mine"); err != nil {
		t.Fatal(err)
	}
	if files := w.logFiles(); len(files) > 0 {
		t.Errorf("logs are left: %v", files)
	}
}

// TestFollowBuild follows a build by its name from the first line to the last.
func TestFollowBuild(t *testing.T) {
	w := withLogs(t)
	hold, inside := make(chan struct{}), make(chan struct{})
	w.images.build = func(context.Context) error {
		close(inside)
		<-hold
		return nil
	}
	built := make(chan error, 1)
	go func() {
		_, err := w.svc.BuildImage(w.ctx(), BuildImage{Name: "mine"}, nil)
		built <- err
	}()
	<-inside
	first := true
	var got bytes.Buffer
	err := w.svc.Logs(w.ctx(), LogRequest{Ref: "mine", Kind: LogBuild, Follow: true}, func(b []byte) error {
		got.Write(b)
		if first {
			close(hold)
		}
		first = false
		return nil
	})
	if err != nil || !strings.Contains(got.String(), "==> building") {
		t.Errorf("followed %q, %v", got.String(), err)
	}
	if err := <-built; err != nil {
		t.Fatal(err)
	}
}

// TestBuildLogIsBounded: a log keeps its start and its end, and says what is missing.
func TestBuildLogIsBounded(t *testing.T) {
	ls := buildLogs{dir: t.TempDir()}
	l, err := ls.start("im00000000000000000001", "big")
	if err != nil {
		t.Fatal(err)
	}
	const lines = 60000
	for i := range lines {
		l.output(fmt.Appendf(nil, "line %06d of the output that a program floods the log with", i))
	}
	if err := ls.finish(l, "im00000000000000000002", nil); err != nil {
		t.Fatal(err)
	}
	b, err := ls.read("im00000000000000000002")
	if err != nil {
		t.Fatal(err)
	}
	if len(b) > logHeadBytes+logTailBytes+100 {
		t.Errorf("the log has %d bytes", len(b))
	}
	for _, part := range []string{"line 000000", fmt.Sprintf("line %06d", lines-1), "bytes are left out"} {
		if !bytes.Contains(b, []byte(part)) {
			t.Errorf("the log lacks %q", part)
		}
	}
	if err := ls.sweep(map[string]bool{}); err != nil {
		t.Fatal(err)
	}
	_, err = ls.read("im00000000000000000002")
	(&world{t: t}).wantClass(err, errdefs.ErrNotFound)
}

func TestConsoleLog(t *testing.T) {
	w := withLogs(t)
	w.base()
	sb := w.fork("base", 1)[0]
	text, err := w.logs(LogRequest{Ref: sb.ID})
	if err != nil || text == "" {
		t.Errorf("console is %q, %v", text, err)
	}
	// A followed console ends with its sandbox.
	got := make(chan struct{}, 1)
	ended := make(chan error, 1)
	go func() {
		ended <- w.svc.Logs(w.ctx(), LogRequest{Ref: sb.ID, Kind: LogConsole, Follow: true}, func([]byte) error {
			got <- struct{}{}
			return nil
		})
	}()
	<-got
	w.host.Crash(sb.ID, "crashed")
	if err := <-ended; err != nil {
		t.Errorf("the end of a followed console is %v", err)
	}
	w.eventually("the end is known", func() bool {
		_, err := w.logs(LogRequest{Ref: sb.ID})
		return errdefs.Class(err) == errdefs.ErrConflict
	})
	_, err = w.logs(LogRequest{Ref: "nothing"})
	w.wantClass(err, errdefs.ErrNotFound)
	_, err = w.logs(LogRequest{Ref: "base", Kind: "other"})
	w.wantClass(err, errdefs.ErrInvalid)
}

func TestNewPartOfConsole(t *testing.T) {
	long := strings.Repeat("x", 5000)
	for _, c := range []struct{ before, now, want string }{
		{"", "abc", "abc"},
		{"abc", "abc", ""},
		{"abc", "abcde", "de"},
		{"0" + long + "abc", long[:100] + "abc" + "def", "long[:100]"},
		{"lost", "other", "other"},
		{long + "end", long[2000:] + "end+more", "+more"},
	} {
		got := string(newPart([]byte(c.before), []byte(c.now)))
		if c.want == "long[:100]" {
			c.want = c.now // too little is left of it to be sure
		}
		if got != c.want {
			t.Errorf("new part of %d bytes after %d is %q, want %q", len(c.now), len(c.before), got, c.want)
		}
	}
}

func TestStats(t *testing.T) {
	w := newWorld(t, nil)
	w.base()
	made := w.fork("base", 3)
	w.host.Crash(made[1].ID, "crashed")
	w.eventually("it has ended", func() bool {
		sb, err := w.svc.Sandbox(w.ctx(), made[1].ID)
		return err == nil && sb.State == Failed
	})
	w.exec(made[2].ID, "hostname")
	stats, err := w.svc.Stats(w.ctx())
	if err != nil || len(stats) != 2 {
		t.Fatalf("stats are %+v, %v", stats, err)
	}
	if stats[0].Sandbox.ID != made[0].ID && stats[0].Sandbox.ID != made[2].ID {
		t.Errorf("stats are of %s", stats[0].Sandbox.ID)
	}
	for _, st := range stats {
		if st.Usage.LastActivity.Before(st.Sandbox.CreatedAt) || st.Usage.PSSKiB == 0 {
			t.Errorf("usage of %s is %+v", st.Sandbox.ID, st.Usage)
		}
	}
}
