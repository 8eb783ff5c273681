package virtiotest

import (
	"encoding/hex"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// Golden compares a state with the one in testdata/NAME.hex, whose bytes never change within a version.
// With FORKD_UPDATE_GOLDEN=1 it writes the file. It returns the bytes of the file.
func Golden(t testing.TB, name string, state []byte) []byte {
	t.Helper()
	file := filepath.Join("testdata", name+".hex")
	if os.Getenv("FORKD_UPDATE_GOLDEN") != "" {
		var b strings.Builder
		for rest := state; len(rest) > 0; rest = rest[min(32, len(rest)):] {
			b.WriteString(hex.EncodeToString(rest[:min(32, len(rest))]) + "\n")
		}
		if err := os.MkdirAll("testdata", 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(file, []byte(b.String()), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	want, err := hex.DecodeString(strings.ReplaceAll(string(text), "\n", ""))
	if err != nil {
		t.Fatal(err)
	}
	if string(want) != string(state) {
		t.Errorf("state %s is\n% x, the golden file has\n% x:\nwhat is stored changed, so its version must", name, state, want)
	}
	return want
}
