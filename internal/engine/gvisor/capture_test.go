package gvisor

import (
	"encoding/json"
	"errors"
	"io"
	"os"
	"path/filepath"
	"testing"
	"time"

	"forkd.dev/forkd/internal/engine"
	"forkd.dev/forkd/internal/errdefs"
)

// stateIn writes a state with files of a few bytes.
func stateIn(t testing.TB, dir, agent string) engine.State {
	t.Helper()
	var artifacts []engine.Artifact
	for _, name := range []string{stateArtifact, pagesArtifact, metaArtifact, agentArtifact} {
		if name == agentArtifact && agent == "" {
			continue
		}
		if err := os.WriteFile(filepath.Join(dir, name), []byte("content of "+name+agent), 0o600); err != nil {
			t.Fatal(err)
		}
		artifacts = append(artifacts, engine.Artifact{Name: name, Kind: kindDevice, Format: formatRunsc})
	}
	all, err := finishState(dir, description{Version: descriptionVersion, Runsc: "test", Tree: "tree", Agent: "digest" + agent}, artifacts)
	if err != nil {
		t.Fatal(err)
	}
	return engine.State{ID: "sn00000000000000000000", Dir: dir, Artifacts: all}
}

func TestDescriptionFindsDamage(t *testing.T) {
	s := stateIn(t, t.TempDir(), "a")
	desc, err := readDescription(s)
	if err != nil || desc.Tree != "tree" || len(desc.Files) != 4 {
		t.Fatalf("%+v, %v", desc, err)
	}
	path := filepath.Join(s.Dir, pagesArtifact)
	if err := os.WriteFile(path, []byte("Content of "+pagesArtifact+"a"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := readDescription(s); !errors.Is(err, errdefs.ErrCorrupt) {
		t.Errorf("a changed file: %v", err)
	}
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	if _, err := readDescription(s); !errors.Is(err, errdefs.ErrNotFound) {
		t.Errorf("a missing file: %v", err)
	}
}

// TestAgentOfChain: the program comes from whichever state of the chain has it.
func TestAgentOfChain(t *testing.T) {
	first, second := stateIn(t, t.TempDir(), "a"), stateIn(t, t.TempDir(), "")
	d := &Driver{}
	path, err := d.agentOf([]engine.State{first, second}, "digesta")
	if err != nil || path != filepath.Join(first.Dir, agentArtifact) {
		t.Errorf("%s, %v", path, err)
	}
	if _, err := d.agentOf([]engine.State{second}, "digesta"); !errors.Is(err, errdefs.ErrNotFound) {
		t.Errorf("a chain without it: %v", err)
	}
}

func FuzzDescription(f *testing.F) {
	s := stateIn(f, f.TempDir(), "a")
	text, err := os.ReadFile(filepath.Join(s.Dir, descArtifact))
	if err != nil {
		f.Fatal(err)
	}
	f.Add(text)
	f.Add([]byte(`{"version":1,"files":[{"name":"../x"}]}`))
	f.Fuzz(func(t *testing.T, text []byte) {
		desc, err := parseDescription(text)
		if err != nil {
			if c := errdefs.Class(err); c != errdefs.ErrCorrupt && c != errdefs.ErrIncompatible {
				t.Errorf("error has class %v", c)
			}
			return
		}
		for _, file := range desc.Files {
			if filepath.Base(file.Name) != file.Name {
				t.Errorf("a name that is a path: %q", file.Name)
			}
		}
		if _, err := json.Marshal(desc); err != nil {
			t.Error(err)
		}
	})
}

// TestPipesOutliveTheDaemon: what holds both ends keeps them open, whoever else comes
// and goes, and tells its own end.
func TestPipesOutliveTheDaemon(t *testing.T) {
	dir := t.TempDir()
	stdio, err := makePipes(dir)
	if err != nil {
		t.Fatal(err)
	}
	for range 2 {
		c, err := dialPipes(dir)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := c.Write([]byte("ping")); err != nil {
			t.Fatal(err)
		}
		var b [4]byte
		if _, err := io.ReadFull(stdio[0], b[:]); err != nil || string(b[:]) != "ping" {
			t.Fatalf("the sandbox reads %q, %v", b, err)
		}
		if _, err := stdio[1].WriteString("pong"); err != nil {
			t.Fatal(err)
		}
		if _, err := io.ReadFull(c, b[:]); err != nil || string(b[:]) != "pong" {
			t.Fatalf("we read %q, %v", b, err)
		}
		if err := errors.Join(c.SetReadDeadline(time.Unix(1, 0)), c.SetDeadline(time.Time{}), c.Close(), c.Close()); err != nil {
			t.Fatal(err)
		}
	}
	c, err := dialPipes(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	closeAll(stdio)
	if _, err := c.Read(make([]byte, 1)); !errors.Is(err, io.EOF) {
		t.Errorf("reading from a sandbox that has ended: %v", err)
	}
	if _, err := dialPipes(dir); !errors.Is(err, errdefs.ErrUnavailable) {
		t.Errorf("dialing one: %v", err)
	}
}
