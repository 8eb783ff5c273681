package snapshot

import (
	"bytes"
	"errors"
	"flag"
	"math"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"

	"forkd.dev/forkd/internal/engine"
	"forkd.dev/forkd/internal/errdefs"
	"forkd.dev/forkd/internal/ident"
)

var update = flag.Bool("update", false, "write the golden files anew")

const (
	rootID  = "sn0000000000000000root"
	childID = "sn000000000000000child"
)

func sampleManifest() Manifest {
	return Manifest{
		ID:        childID,
		ParentID:  rootID,
		CreatedAt: time.Date(2024, 1, 2, 3, 4, 5, 678000, time.UTC),
		Image:     Image{ID: "im00000000000000000000", Name: "python", Digest: "sha256:" + strings.Repeat("ab", 32)},
		Compat:    engine.Compat{Engine: "qemu", EngineBuild: "7.2.22", Accelerator: "tcg", CPU: "max"},
		Isolation: engine.IsolationEmulated,
		Shape:     engine.Shape{CPUs: 1, MemoryMiB: 512, DiskMiB: 4096},
		Artifacts: []Artifact{
			{engine.Artifact{Name: "memory.layer", Kind: "memory", Format: "forkd-layer-1", Bytes: 8192}, 5000, "sha256:" + strings.Repeat("01", 32)},
			{engine.Artifact{Name: "device.state", Kind: "device", Format: "qemu-xen-7.2", Bytes: 4096}, 100, "sha256:" + strings.Repeat("02", 32)},
		},
		Labels:       map[string]string{"team": "a<b>&c"},
		Recipe:       Recipe{From: rootID, Warm: "import numpy\nprint('<ok>')", Exec: []string{"true"}},
		Agent:        Agent{Protocol: 1, WarmLanguages: []string{"python"}, RunnerQuiet: true},
		HoldsSecrets: true,
		Disk:         DiskSynced,
		PauseMs:      12.5,
	}
}

func mustEncode(t testing.TB, m Manifest) (Manifest, []byte) {
	t.Helper()
	m, b, err := encodeManifest(m)
	if err != nil {
		t.Fatal(err)
	}
	return m, b
}

func wantClass(t testing.TB, err, class error) {
	t.Helper()
	if !errors.Is(errdefs.Class(err), class) {
		t.Errorf("got %v (class %v), want class %v", err, errdefs.Class(err), class)
	}
}

// TestGoldenManifestV1 fixes the bytes of version 1 in both directions.
func TestGoldenManifestV1(t *testing.T) {
	path := filepath.Join("testdata", "manifest_v1.json")
	want, made := mustEncode(t, sampleManifest())
	if *update {
		if err := os.WriteFile(path, made, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	golden, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if got, err := decodeManifest(golden); err != nil || !reflect.DeepEqual(got, want) {
		t.Errorf("got %+v (%v), want %+v", got, err, want)
	}
	if !bytes.Equal(golden, made) {
		t.Errorf("the encoding has changed:\n%s", made)
	}
}

// resum replaces text in a manifest and makes its checksum right again.
func resum(t testing.TB, b []byte, old, new string) []byte {
	t.Helper()
	if !bytes.Contains(b, []byte(old)) {
		t.Fatalf("no %q in the manifest", old)
	}
	at := bytes.LastIndex(b, []byte("sha256:"))
	sum := string(b[at : at+len(blankSum)])
	b = bytes.Replace(b, []byte(sum), []byte(blankSum), 1)
	b = bytes.Replace(b, []byte(old), []byte(new), 1)
	return bytes.Replace(b, []byte(blankSum), []byte(digestOf(b)), 1)
}

func TestDecodeRefuses(t *testing.T) {
	_, good := mustEncode(t, sampleManifest())
	change := func(old, new string) []byte { return resum(t, good, old, new) }
	for name, c := range map[string]struct {
		bytes []byte
		want  error
	}{
		"empty":            {nil, errdefs.ErrCorrupt},
		"no object":        {[]byte("[]"), errdefs.ErrCorrupt},
		"truncated":        {good[:len(good)/2], errdefs.ErrCorrupt},
		"too long":         {append(bytes.Clone(good), bytes.Repeat([]byte(" "), MaxManifestBytes)...), errdefs.ErrCorrupt},
		"changed":          {bytes.Replace(good, []byte("512"), []byte("513"), 1), errdefs.ErrCorrupt},
		"newer":            {change(`"version": 1`, `"version": 2`), errdefs.ErrIncompatible},
		"newer, changed":   {bytes.Replace(good, []byte(`"version": 1`), []byte(`"version": 9`), 1), errdefs.ErrIncompatible},
		"unknown field":    {change(`"pause_ms"`, `"colour": 1, "pause_ms"`), errdefs.ErrIncompatible},
		"text after":       {append(bytes.Clone(good), "{}"...), errdefs.ErrCorrupt},
		"no checksum":      {change(`"checksum"`, `"labels": {}, "ck"`), errdefs.ErrCorrupt},
		"path":             {change(`"memory.layer"`, `"../../etc/passwd"`), errdefs.ErrCorrupt},
		"absolute":         {change(`"memory.layer"`, `"/etc/passwd"`), errdefs.ErrCorrupt},
		"dots":             {change(`"memory.layer"`, `".."`), errdefs.ErrCorrupt},
		"hidden":           {change(`"memory.layer"`, `".x"`), errdefs.ErrCorrupt},
		"NUL":              {change(`"memory.layer"`, `"a\u0000b"`), errdefs.ErrCorrupt},
		"itself":           {change(`"memory.layer"`, `"manifest.json"`), errdefs.ErrCorrupt},
		"twice":            {change(`"memory.layer"`, `"device.state"`), errdefs.ErrCorrupt},
		"negative size":    {change(`"size": 5000`, `"size": -1`), errdefs.ErrCorrupt},
		"digest":           {change(`sha256:0101`, `sha256:zz01`), errdefs.ErrCorrupt},
		"kind":             {change(`"kind": "memory"`, `"kind": "secret"`), errdefs.ErrCorrupt},
		"own parent":       {change(`"parent_id": "`+rootID, `"parent_id": "`+childID), errdefs.ErrCorrupt},
		"parent form":      {change(`"parent_id": "sn`, `"parent_id": "im`), errdefs.ErrCorrupt},
		"no cpus":          {change(`"cpus": 1`, `"cpus": 0`), errdefs.ErrCorrupt},
		"huge memory":      {change(`"memory_mib": 512`, `"memory_mib": 99999999999`), errdefs.ErrCorrupt},
		"disk":             {change(`"synced"`, `"maybe"`), errdefs.ErrCorrupt},
		"label":            {change(`"team"`, `"te am"`), errdefs.ErrCorrupt},
		"negative pause":   {change(`12.5`, `-12.5`), errdefs.ErrCorrupt},
		"duplicated field": {change(`"version": 1`, `"version": 2, "version": 1, "id": "x"`), nil},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := decodeManifest(c.bytes)
			wantClass(t, err, c.want)
		})
	}
}

func TestEncodeRefuses(t *testing.T) {
	for name, change := range map[string]func(*Manifest){
		"no id":       func(m *Manifest) { m.ID = "" },
		"sandbox id":  func(m *Manifest) { m.ID = ident.New(ident.Sandbox) },
		"no time":     func(m *Manifest) { m.CreatedAt = time.Time{} },
		"no engine":   func(m *Manifest) { m.Compat.Engine = "" },
		"no files":    func(m *Manifest) { m.Artifacts = nil },
		"NaN":         func(m *Manifest) { m.PauseMs = math.NaN() },
		"infinite":    func(m *Manifest) { m.PauseMs = math.Inf(1) },
		"not UTF-8":   func(m *Manifest) { m.Recipe.Warm = "\xff" },
		"long recipe": func(m *Manifest) { m.Recipe.Warm = strings.Repeat("x", MaxManifestBytes) },
		"many labels": func(m *Manifest) {
			for i := range 65 {
				m.Labels["l"+strings.Repeat("x", i)] = ""
			}
		},
		"year": func(m *Manifest) { m.CreatedAt = time.Date(20000, 1, 1, 0, 0, 0, 0, time.UTC) },
	} {
		t.Run(name, func(t *testing.T) {
			m := sampleManifest()
			change(&m)
			_, _, err := encodeManifest(m)
			wantClass(t, err, errdefs.ErrInvalid)
		})
	}
}

func TestCloneSharesNothing(t *testing.T) {
	m := sampleManifest()
	c := m.clone()
	c.Artifacts[0].Name, c.Labels["team"], c.Recipe.Exec[0], c.Agent.WarmLanguages[0] = "x", "x", "x", "x"
	if !reflect.DeepEqual(m, sampleManifest()) {
		t.Error("a change of the clone changed the original")
	}
}

func FuzzManifest(f *testing.F) {
	_, good := mustEncode(f, sampleManifest())
	f.Add(good)
	f.Add([]byte(`{"version": 1, "checksum": "sha256:"}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		if at := bytes.LastIndex(b, []byte("sha256:")); at >= 0 && at+len(blankSum) <= len(b) {
			// Or the fuzzer never gets past the checksum.
			b = bytes.Clone(b)
			copy(b[at:], blankSum)
			copy(b[at:], digestOf(b))
		}
		parentOf(b)
		m, err := decodeManifest(b)
		if err != nil {
			if c := errdefs.Class(err); !errors.Is(c, errdefs.ErrCorrupt) && !errors.Is(c, errdefs.ErrIncompatible) {
				t.Fatalf("class %v of %v", c, err)
			}
			return
		}
		for _, a := range m.Artifacts {
			if a.Name != filepath.Base(a.Name) || a.Name == ".." || a.Name == "." {
				t.Fatalf("artifact name %q", a.Name)
			}
		}
		// What is accepted can be written and read again.
		again, _, err := encodeManifest(m)
		if err != nil {
			t.Fatal(err)
		}
		again.Checksum, again.CreatedAt, m.CreatedAt = m.Checksum, time.Time{}, time.Time{}
		if len(m.Labels) == 0 {
			m.Labels, again.Labels = nil, nil
		}
		if !reflect.DeepEqual(again, m.clone()) {
			t.Fatalf("%+v became %+v", m, again)
		}
	})
}
