package config

import (
	"errors"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"forkd.dev/forkd/internal/errdefs"
)

func file(t *testing.T, text string, mode os.FileMode) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "config.toml")
	if err := os.WriteFile(path, []byte(text), mode); err != nil {
		t.Fatal(err)
	}
	return path
}

func env(kv ...string) func(string) string {
	m := map[string]string{}
	for i := 0; i < len(kv); i += 2 {
		m[kv[i]] = kv[i+1]
	}
	return func(k string) string { return m[k] }
}

// TestPrecedence sets the same thing in all places and takes them away one by one.
func TestPrecedence(t *testing.T) {
	system := file(t, `max_sandboxes = 1`, 0o644)
	user := file(t, `max_sandboxes = 2`, 0o644)
	flags := map[string][]string{"max-sandboxes": {"4"}}
	for _, c := range []struct {
		src    Sources
		want   int
		origin string
	}{
		{Sources{Files: []string{system, user}, Getenv: env("FORKD_MAX_SANDBOXES", "3"), Flags: flags}, 4, FromFlag},
		{Sources{Files: []string{system, user}, Getenv: env("FORKD_MAX_SANDBOXES", "3")}, 3, FromEnv},
		{Sources{Files: []string{system, user}, Getenv: env()}, 2, user},
		{Sources{Files: []string{system, ""}, Getenv: env()}, 1, system},
		{Sources{Files: []string{"/does/not/exist"}, Getenv: env()}, 0, FromDefault},
	} {
		got, err := Load(c.src)
		if err != nil {
			t.Fatal(err)
		}
		v := got.values["max_sandboxes"]
		if got.Int("max_sandboxes") != c.want || v.Origin != c.origin {
			t.Errorf("got %d from %s, want %d from %s", got.Int("max_sandboxes"), v.Origin, c.want, c.origin)
		}
	}
}

func TestForms(t *testing.T) {
	path := file(t, "bind = [\"127.0.0.1:1\", \"[::1]:2\"]\nprepare = \"py-base\"\nmemory_budget = 4096\nlog_level = \"warn\"\ntoken = \"secret\"\n", 0o600)
	c, err := Load(Sources{Files: []string{path}, Getenv: env("FORKD_ALLOW_HOST", "a.example, b.example")})
	if err != nil {
		t.Fatal(err)
	}
	for key, want := range map[string][]string{
		"bind": {"127.0.0.1:1", "[::1]:2"}, "prepare": {"py-base"}, "memory_budget": {"4096"}, "allow_host": {"a.example", "b.example"},
	} {
		if got := c.List(key); !reflect.DeepEqual(got, want) {
			t.Errorf("%s is %q, want %q", key, got, want)
		}
	}
	shown := map[string]string{}
	for _, v := range c.All() {
		shown[v.Key] = v.Shown()
	}
	if len(shown) != len(Table()) || shown["token"] != "(set)" || shown["max_sandboxes"] != "2000" || shown["bind"] != "127.0.0.1:1, [::1]:2" {
		t.Errorf("shown are %v", shown)
	}
	if c.Text("token") != "secret" {
		t.Errorf("token is %q", c.Text("token"))
	}
}

// TestRefusals: what is wrong is named with its file, line or variable.
func TestRefusals(t *testing.T) {
	for text, part := range map[string]string{
		`bnid = "127.0.0.1:1"`:           `there is no setting "bnid"`,
		"[serve]\nbind = \"x:1\"":        `there is no setting "serve"`,
		"bind = \"x:1\"\nbind = [":       "line 2",
		`bind = "127.0.0.1"`:             "bind: \"127.0.0.1\" is not host:port",
		`max_sandboxes = "many"`:         `max_sandboxes: "many" is not a number`,
		`max_sandboxes = [1]`:            "max_sandboxes: it has one value",
		`bind = [1]`:                     "bind: 1 in the list is no text",
		`engine = true`:                  "engine: true is neither text nor a number",
		`log_level = "loud"`:             "is not debug",
		`memory_budget = "120%"`:         "between 1% and 100%",
		strings.Repeat("#", 1<<20) + "#": "more than 1048576 bytes",
	} {
		path := file(t, text, 0o600)
		_, err := Load(Sources{Files: []string{path}, Getenv: env()})
		if !errors.Is(err, errdefs.ErrInvalid) || !strings.Contains(err.Error(), path) || !strings.Contains(err.Error(), part) {
			t.Errorf("%.40q: %v, want %q", text, err, part)
		}
	}
	open := file(t, `token = "secret"`, 0o644)
	_, err := Load(Sources{Files: []string{open}, Getenv: env()})
	if !errors.Is(err, errdefs.ErrInvalid) || strings.Contains(err.Error(), "secret") || !strings.Contains(errdefs.Hint(err), "chmod 600") {
		t.Errorf("a token for all to read: %v", err)
	}
	_, err = Load(Sources{Getenv: env("FORKD_MAX_SANDBOXES", "-2")})
	if !errors.Is(err, errdefs.ErrInvalid) || !strings.Contains(err.Error(), "$FORKD_MAX_SANDBOXES: -2 is negative") {
		t.Errorf("bad variable: %v", err)
	}
	_, err = Load(Sources{Getenv: env(), Flags: map[string][]string{"log-level": {"loud"}}})
	if !errors.Is(err, errdefs.ErrInvalid) || !strings.Contains(err.Error(), "--log-level: ") {
		t.Errorf("bad flag: %v", err)
	}
}

func TestUserFile(t *testing.T) {
	for want, getenv := range map[string]func(string) string{
		"/x/forkd/config.toml":         env("XDG_CONFIG_HOME", "/x", "HOME", "/h"),
		"/h/.config/forkd/config.toml": env("XDG_CONFIG_HOME", "relative", "HOME", "/h"),
		"":                             env(),
	} {
		if got := UserFile(getenv); got != want {
			t.Errorf("got %q, want %q", got, want)
		}
	}
}

func TestBudget(t *testing.T) {
	for text, want := range map[string]int{"80%": 800, "1%": 10, "100%": 1000, "512": 512, "512M": 512, "2G": 2048, "2GiB": 2048} {
		b, err := ParseBudget(text)
		if err != nil || b.Of(1000) != want {
			t.Errorf("%s: %d, %v, want %d", text, b.Of(1000), err, want)
		}
	}
	for _, bad := range []string{"", "0", "-1", "0%", "101%", "%", "1.5G", "9999999T", "x", "5K"} {
		if b, err := ParseBudget(bad); err == nil {
			t.Errorf("%q is %+v", bad, b)
		}
	}
}

// TestTable: keys, flags and variables are unique and follow one rule.
func TestTable(t *testing.T) {
	seen := map[string]bool{}
	for _, s := range Table() {
		for _, name := range []string{"key " + s.Key, "flag " + s.Flag, "env " + s.Env} {
			if seen[name] {
				t.Errorf("%s is there twice", name)
			}
			seen[name] = true
		}
		if s.Env != "FORKD_"+strings.ToUpper(s.Key) || s.Help == "" {
			t.Errorf("setting %+v", s)
		}
	}
}

// FuzzFile: no content of a file makes the reader fail in another way than by an
// error that names the file.
func FuzzFile(f *testing.F) {
	f.Add([]byte("bind = [\"127.0.0.1:1\"]\nmemory_budget = 5\n"))
	f.Add([]byte("token = \"x\"\n[a]\nb = 1979-05-27\n"))
	f.Fuzz(func(t *testing.T, b []byte) {
		c, err := Load(Sources{Getenv: env()})
		if err != nil {
			t.Fatal(err)
		}
		err = c.parse("/the/file", b, 0o600)
		if err == nil {
			return
		}
		if !errors.Is(err, errdefs.ErrInvalid) || !strings.Contains(err.Error(), "/the/file") {
			t.Errorf("error is %v", err)
		}
	})
}
