package main

import (
	"bytes"
	"flag"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
)

var update = flag.Bool("update", false, "write the list anew")

// TestImports: what the process of every sandbox links is chosen, package by package. Each
// costs memory in every one of them, and is code next to a hostile guest.
func TestImports(t *testing.T) {
	cmd := exec.Command("go", "list", "-deps", ".")
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	out, err := cmd.Output()
	if err != nil {
		t.Fatal(err)
	}
	// What the standard library links for itself changes with its version.
	var got []byte
	for line := range bytes.Lines(out) {
		if !bytes.HasPrefix(line, []byte("internal/")) && !bytes.HasPrefix(line, []byte("runtime")) && !bytes.HasPrefix(line, []byte("vendor/")) {
			got = append(got, line...)
		}
	}
	path := filepath.Join("testdata", "imports.txt")
	if *update {
		if err := os.WriteFile(path, got, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(got, want) {
		t.Errorf("forkd-vmm links other packages than testdata/imports.txt lists. If that is meant: go test ./cmd/forkd-vmm -update")
	}
	for _, never := range []string{"net", "net/http", "encoding/json", "crypto/tls", "os/exec", "plugin"} {
		if bytes.Contains(got, []byte("\n"+never+"\n")) {
			t.Errorf("forkd-vmm links %s", never)
		}
	}
}
