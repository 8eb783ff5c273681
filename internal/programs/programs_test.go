package programs

import (
	"errors"
	"testing"
	"testing/fstest"

	"forkd.dev/forkd/internal/errdefs"
)

func TestReadProgram(t *testing.T) {
	files := fstest.MapFS{
		"embedded/good": {Data: []byte("\x7fELF rest")},
		"embedded/text": {Data: []byte("#!/bin/sh")},
	}
	if b, err := read(files, "good"); err != nil || string(b) != "\x7fELF rest" {
		t.Errorf("good program: %q, %v", b, err)
	}
	if _, err := read(files, "text"); !errors.Is(err, errdefs.ErrCorrupt) {
		t.Errorf("a script: %v, want ErrCorrupt", err)
	}
	_, err := read(files, "absent")
	if !errors.Is(err, errdefs.ErrUnavailable) || errdefs.Hint(err) == "" {
		t.Errorf("absent program: %v (hint %q), want ErrUnavailable with a hint", err, errdefs.Hint(err))
	}
}

func TestAgentIsWholeOrUnavailable(t *testing.T) {
	b, err := Agent()
	if err != nil && !errors.Is(err, errdefs.ErrUnavailable) {
		t.Fatal(err)
	}
	if err == nil && len(Digest(b)) != len("sha256-")+64 {
		t.Errorf("digest %q", Digest(b))
	}
	if Version() == "" {
		t.Error("no version")
	}
}
