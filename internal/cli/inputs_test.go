package cli

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"forkd.dev/forkd/internal/agentwire"
	"forkd.dev/forkd/internal/sandbox"
)

// TestForkInputs: what single children get, secrets and the reseed mode reach the daemon.
func TestForkInputs(t *testing.T) {
	r := newRig(t)
	var got sandbox.Fork
	r.svc.OnFork = func(_ context.Context, f sandbox.Fork) error {
		got = f
		return nil
	}
	dir := t.TempDir()
	secret, each := filepath.Join(dir, "secret"), filepath.Join(dir, "each")
	lines := `{"env":{"HINT":"a"},"labels":{"try":"1"},"files":{"/work/hint":"text"}}

{"files_base64":{"/bin/x":"AAEC"}}
`
	for name, text := range map[string]string{secret: "s3cret\n", each: lines} {
		if err := os.WriteFile(name, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	r.env["TOKEN"] = "t0ken"
	o := r.run("fork", "py-base", "--each", each, "--secret", "TOKEN", "--secret", "KEY=@"+secret, "--reseed", "seed=9", "--with-secrets", "-q")
	if o.code != 0 || len(strings.Fields(o.stdout)) != 2 {
		t.Fatalf("%+v", o)
	}
	if fmt.Sprint(got.Secrets) != "map[KEY:s3cret TOKEN:t0ken]" || !got.WithSecrets || got.Reseed != (sandbox.Reseed{Mode: agentwire.ReseedSeed, Seed: 9}) {
		t.Errorf("the daemon was asked for %+v", got)
	}
	if len(got.Children) != 2 || got.Children[0].Env["HINT"] != "a" || got.Children[0].Labels["try"] != "1" ||
		string(got.Children[0].Files["/work/hint"]) != "text" || string(got.Children[1].Files["/bin/x"]) != "\x00\x01\x02" {
		t.Errorf("children get %+v", got.Children)
	}
	r.stdin = lines
	if o := r.run("fork", "py-base", "--each", "-", "-q"); o.code != 0 || len(got.Children) != 2 {
		t.Errorf("from standard input: %+v", o)
	}
}

func TestBadForkInputs(t *testing.T) {
	r := newRig(t)
	for name, c := range map[string]struct {
		stdin string
		args  []string
		want  string
	}{
		"secret in argv": {"", []string{"--secret", "K=v"}, "does not belong on a command line"},
		"no variable":    {"", []string{"--secret", "NOPE"}, "no such variable"},
		"no file":        {"", []string{"--each", "/does/not/exist"}, "no such file"},
		"not JSON":       {"{}\nhello\n", []string{"--each", "-"}, "line 2"},
		"two objects":    {"{} {}\n", []string{"--each", "-"}, "behind the object"},
		"unknown field":  {`{"hint":"x"}`, []string{"--each", "-"}, "hint"},
		"empty":          {"\n", []string{"--each", "-"}, "no line"},
		"other number":   {"{}\n{}\n", []string{"--each", "-", "-n", "3"}, "inputs for 2 children"},
		"reseed":         {"", []string{"--reseed", "some"}, "not all, system or seed=N"},
	} {
		r.stdin = c.stdin
		if o := r.run(append([]string{"fork", "py-base"}, c.args...)...); o.code != 2 || !strings.Contains(o.stderr, c.want) || strings.Contains(o.stderr, "=v") {
			t.Errorf("%s: %+v", name, o)
		}
	}
}
