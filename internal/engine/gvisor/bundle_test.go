package gvisor

import (
	"bytes"
	"encoding/json"
	"flag"
	"os"
	"path/filepath"
	"testing"

	"forkd.dev/forkd/internal/engine"
)

var update = flag.Bool("update", false, "write the golden files anew")

// TestGoldenBundle: what a sandbox is made of changes only on purpose. State that was
// captured in a sandbox of another bundle may not be restorable.
func TestGoldenBundle(t *testing.T) {
	b := bundle{
		dir: "/data/sandboxes/sb", stage: "/mnt", uid: firstUID,
		root: engine.Root{Tree: "/data/images/im/tree.erofs"}, shape: engine.Shape{CPUs: 2, MemoryMiB: 512, DiskMiB: 1024},
	}
	var got bytes.Buffer
	enc := json.NewEncoder(&got)
	enc.SetIndent("", "\t")
	if err := enc.Encode(b.config()); err != nil {
		t.Fatal(err)
	}
	path := filepath.Join("testdata", "bundle.golden")
	if *update {
		if err := os.WriteFile(path, got.Bytes(), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(got.Bytes(), want) {
		t.Errorf("the bundle is\n%s\nwant\n%s(go test -update writes it anew)", got.Bytes(), want)
	}
}
