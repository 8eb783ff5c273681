package metadata

import (
	"bufio"
	"context"
	"database/sql"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"forkd.dev/forkd/internal/errdefs"
	"forkd.dev/forkd/internal/ident"
)

var update = flag.Bool("update", false, "write the golden files anew")

// childDir, if set, makes the test binary play a daemon that is about to be killed.
const childDir = "FORKD_TEST_JOURNAL_DIR"

func TestMain(m *testing.M) {
	if dir := os.Getenv(childDir); dir != "" {
		writeUntilKilled(dir)
	}
	os.Exit(m.Run())
}

func openIn(t testing.TB, dir string) *DB {
	t.Helper()
	d, err := Open(t.Context(), Config{Dir: dir})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := d.Close(); err != nil {
			t.Error(err)
		}
	})
	return d
}

func wantClass(t testing.TB, err, class error) {
	t.Helper()
	if !errors.Is(errdefs.Class(err), class) {
		t.Errorf("got %v (class %v), want class %v", err, errdefs.Class(err), class)
	}
}

func TestReopen(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "a?b#c %41") // the path must survive as a URL
	d := openIn(t, dir)
	id := d.Installation()
	if len(id) != 20 {
		t.Errorf("installation %q", id)
	}
	if err := d.UpdateSandboxes(t.Context(), nil); err != nil {
		t.Error(err)
	}
	if err := errors.Join(d.Close(), d.Close()); err != nil {
		t.Fatal(err)
	}
	wantClass(t, d.PutBuild(t.Context(), Build{ID: "b"}), errdefs.ErrUnavailable)
	if again := openIn(t, dir); again.Installation() != id {
		t.Errorf("installation changed from %q to %q", id, again.Installation())
	}
	info, err := os.Stat(filepath.Join(dir, fileName))
	if err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("database: %v %v", info, err)
	}
}

func TestLockNamesHolder(t *testing.T) {
	dir := t.TempDir()
	openIn(t, dir)
	_, err := Open(t.Context(), Config{Dir: dir})
	wantClass(t, err, errdefs.ErrConflict)
	if want := fmt.Sprintf("process %d", os.Getpid()); err == nil || !strings.Contains(err.Error(), want) || errdefs.Hint(err) == "" {
		t.Errorf("%v does not name %s or has no hint", err, want)
	}
}

func TestSettings(t *testing.T) {
	d := openIn(t, t.TempDir())
	for pragma, want := range map[string]string{"journal_mode": "wal", "synchronous": "1", "foreign_keys": "1"} {
		var got string
		if err := d.writer.conn.QueryRowContext(t.Context(), "PRAGMA "+pragma).Scan(&got); err != nil || got != want {
			t.Errorf("%s is %q (%v), want %q", pragma, got, err, want)
		}
	}
	if _, err := d.readers.ExecContext(t.Context(), "DELETE FROM meta"); err == nil {
		t.Error("a reader can write")
	}
}

func tamper(t *testing.T, dir, script string) {
	t.Helper()
	db, err := sql.Open("sqlite", filepath.Join(dir, fileName))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := db.ExecContext(t.Context(), script); err != nil {
		t.Fatal(err)
	}
	if err := db.Close(); err != nil {
		t.Fatal(err)
	}
}

func TestOpenRefuses(t *testing.T) {
	for name, c := range map[string]struct {
		damage func(t *testing.T, dir string)
		want   error
	}{
		"newer schema": {func(t *testing.T, dir string) { tamper(t, dir, "PRAGMA user_version = 1000") }, errdefs.ErrIncompatible},
		"other program": {func(t *testing.T, dir string) {
			tamper(t, dir, "PRAGMA application_id = 77")
		}, errdefs.ErrIncompatible},
		"no database": {func(t *testing.T, dir string) {
			if err := os.WriteFile(filepath.Join(dir, fileName), []byte(strings.Repeat("not sqlite ", 1000)), 0o600); err != nil {
				t.Fatal(err)
			}
		}, errdefs.ErrCorrupt},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			if err := openIn(t, dir).Close(); err != nil {
				t.Fatal(err)
			}
			c.damage(t, dir)
			_, err := Open(t.Context(), Config{Dir: dir})
			wantClass(t, err, c.want)
			lock, err := lockDir(dir)
			if err != nil {
				t.Fatalf("the lock was kept: %v", err)
			}
			lock.Close()
		})
	}
	_, err := Open(t.Context(), Config{})
	wantClass(t, err, errdefs.ErrInvalid)
}

// TestGoldenSchema fixes the result of the migrations: a released one must not change.
func TestGoldenSchema(t *testing.T) {
	d := openIn(t, t.TempDir())
	var got strings.Builder
	fmt.Fprintf(&got, "-- version %d\n", len(migrations))
	err := d.query(t.Context(), func(rows *sql.Rows) error {
		var s string
		err := rows.Scan(&s)
		fmt.Fprintf(&got, "%s;\n", s)
		return err
	}, "SELECT sql FROM sqlite_schema WHERE sql IS NOT NULL ORDER BY name")
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join("testdata", fmt.Sprintf("schema_v%d.sql", len(migrations)))
	if *update {
		if err := os.WriteFile(path, []byte(got.String()), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if got.String() != string(want) {
		t.Errorf("the schema differs from %s:\n%s", path, got.String())
	}
}

// TestFailedMigrationChangesNothing interrupts the step to a next version.
func TestFailedMigrationChangesNothing(t *testing.T) {
	dir := t.TempDir()
	if err := openIn(t, dir).Close(); err != nil {
		t.Fatal(err)
	}
	tamper(t, dir, "PRAGMA user_version = 0; PRAGMA application_id = 0") // CREATE TABLE meta will fail
	if _, err := Open(t.Context(), Config{Dir: dir}); err == nil {
		t.Fatal("migrated over existing tables")
	}
	tamper(t, dir, fmt.Sprintf("PRAGMA user_version = %d; PRAGMA application_id = %d", len(migrations), applicationID))
	openIn(t, dir)
}

func TestCancel(t *testing.T) {
	d := openIn(t, t.TempDir())
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	wantClass(t, d.PutBuild(ctx, Build{ID: "b"}), errdefs.ErrCanceled)
	_, err := d.ListSandboxes(ctx, SandboxFilter{})
	wantClass(t, err, errdefs.ErrCanceled)
	if builds, err := d.Builds(t.Context()); err != nil || len(builds) != 0 {
		t.Errorf("a canceled write was done: %v %v", builds, err)
	}
}

// TestGroupCommit joins calls that wait behind a slow one and fails some of them.
func TestGroupCommit(t *testing.T) {
	d := openIn(t, t.TempDir())
	release, held := make(chan struct{}), make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() {
		err := d.writer.submit(t.Context(), relaxed, func(*tx) error { close(held); <-release; return nil })
		if err != nil {
			t.Error(err)
		}
	})
	<-held
	const n = 50
	for i := range n {
		wg.Go(func() {
			s := Sandbox{ID: fmt.Sprintf("sb%020d", i), Name: "same", State: "creating", CreatedAt: time.Unix(1, 0)}
			if i%2 == 0 {
				s.Name = ""
			}
			err := d.InsertSandboxes(t.Context(), []Sandbox{s})
			if err != nil && (i%2 == 0 || !errors.Is(err, errdefs.ErrConflict)) {
				t.Errorf("sandbox %d: %v", i, err)
			}
		})
	}
	close(release)
	wg.Wait()
	all, err := d.ListSandboxes(t.Context(), SandboxFilter{})
	if err != nil || len(all) != n/2+1 {
		t.Errorf("%d sandboxes (%v), want the %d unnamed and one named", len(all), err, n/2)
	}
}

// writeUntilKilled records sandboxes in pairs and says which are promised.
func writeUntilKilled(dir string) {
	d, err := Open(context.Background(), Config{Dir: dir})
	if err != nil {
		fmt.Fprintln(os.Stdout, "error", err)
		os.Exit(1)
	}
	for {
		pair := []Sandbox{{ID: ident.New(ident.Sandbox), Batch: "b"}, {ID: ident.New(ident.Sandbox), Batch: "b"}}
		if err := d.InsertSandboxes(context.Background(), pair); err != nil {
			fmt.Fprintln(os.Stdout, "error", err)
			os.Exit(1)
		}
		fmt.Fprintln(os.Stdout, pair[0].ID, pair[1].ID)
	}
}

// TestKill9 kills a process in the middle of writing: what it had confirmed is
// there, and no pair is half.
func TestKill9(t *testing.T) {
	dir := t.TempDir()
	cmd := exec.CommandContext(t.Context(), os.Args[0])
	cmd.Env = append(os.Environ(), childDir+"="+dir)
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	var confirmed []string
	for lines := bufio.NewScanner(out); lines.Scan(); {
		confirmed = append(confirmed, strings.Fields(lines.Text())...)
		if len(confirmed) == 100 {
			if err := cmd.Process.Kill(); err != nil {
				t.Fatal(err)
			}
		}
	}
	if err := cmd.Wait(); err == nil {
		t.Fatal("the child was not killed")
	}
	if len(confirmed) < 100 {
		t.Fatalf("the child ended early: %q", confirmed)
	}
	d := openIn(t, dir)
	all, err := d.ListSandboxes(t.Context(), SandboxFilter{})
	if err != nil {
		t.Fatal(err)
	}
	have := map[string]bool{}
	for _, s := range all {
		have[s.ID] = true
	}
	for _, id := range confirmed {
		if !have[id] {
			t.Errorf("confirmed sandbox %s is lost", id)
		}
	}
	if len(all)%2 != 0 {
		t.Errorf("%d sandboxes: a pair is half", len(all))
	}
}

func BenchmarkUpdateSandbox(b *testing.B) {
	for _, parallel := range []int{1, 100} {
		b.Run(fmt.Sprintf("callers=%d", parallel), func(b *testing.B) {
			d := openIn(b, b.TempDir())
			all := make([]Sandbox, parallel)
			for i := range all {
				all[i] = Sandbox{ID: ident.New(ident.Sandbox), Labels: map[string]string{"forkd.batch": "b"}, Receipt: []byte(`{"generation":1}`)}
			}
			if err := d.InsertSandboxes(b.Context(), all); err != nil {
				b.Fatal(err)
			}
			for b.Loop() {
				var wg sync.WaitGroup
				for i := range all {
					wg.Go(func() {
						if err := d.UpdateSandbox(b.Context(), all[i]); err != nil {
							b.Error(err)
						}
					})
				}
				wg.Wait()
			}
			b.ReportMetric(float64(b.Elapsed().Microseconds())/float64(b.N*parallel), "µs/update")
		})
	}
}

func BenchmarkInsert100(b *testing.B) {
	d := openIn(b, b.TempDir())
	for b.Loop() {
		all := make([]Sandbox, 100)
		for i := range all {
			all[i] = Sandbox{ID: ident.New(ident.Sandbox), CreatedAt: time.Unix(1, 0)}
		}
		if err := d.InsertSandboxes(b.Context(), all); err != nil {
			b.Fatal(err)
		}
	}
}
