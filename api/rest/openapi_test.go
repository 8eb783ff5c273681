package rest

import (
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// schemas reads the names of the properties and the required ones of each schema
// out of openapi.yaml by its indentation, which is all the YAML this needs.
func schemas(t *testing.T) (props, required map[string][]string) {
	t.Helper()
	props, required = map[string][]string{}, map[string][]string{}
	_, text, ok := strings.Cut(string(OpenAPI), "\n  schemas:\n")
	if !ok {
		t.Fatal("openapi.yaml has no components.schemas")
	}
	name := regexp.MustCompile(`^    (\w+):$`)
	prop := regexp.MustCompile(`^        (\w+):$`)
	need := regexp.MustCompile(`^      required: \[(.*)\]$`)
	current := ""
	for line := range strings.Lines(text) {
		line = strings.TrimRight(line, "\n")
		if m := name.FindStringSubmatch(line); m != nil {
			current = m[1]
			props[current] = nil
		} else if m := prop.FindStringSubmatch(line); m != nil {
			props[current] = append(props[current], m[1])
		} else if m := need.FindStringSubmatch(line); m != nil {
			required[current] = strings.Split(m[1], ", ")
		}
	}
	return props, required
}

// TestSchemasAreTheGoTypes holds openapi.yaml and the Go types to the same fields.
func TestSchemasAreTheGoTypes(t *testing.T) {
	props, required := schemas(t)
	all := []any{
		Error{}, Progress{}, Version{}, Health{}, Sandbox{}, Receipt{}, ReceiptStep{}, Timing{}, Usage{}, CreateSandboxes{},
		ForkFailure{}, ForkLine{}, Exec{}, ExecResult{}, Eval{}, EvalResult{}, Pong{}, Snapshot{}, Recipe{}, SnapshotDetail{},
		CreateSnapshot{}, SnapshotLine{}, SetTag{}, Image{}, BuildImage{}, ImageLine{},
		Pool{}, SetPool{}, Stat{}, Start{}, Kernel{}, AddKernel{}, BranchSandbox{}, Branch{},
		CompactSnapshot{}, Verify{}, Verified{}, VerifyResult{}, VerifyLine{}, DiskUsage{}, SnapshotUse{}, ImageUse{}, Resident{}, Prune{}, Pruned{}, PruneResult{},
		CreateCheckpoint{}, Rollback{}, RolledBack{}, AutoCheckpoint{}, ChildInput{},
		TreeNode{}, DiffStates{}, Diff{}, DiffSide{}, FileChange{}, DiffProcess{}, DiffLine{},
	}
	for _, v := range all {
		typ := reflect.TypeOf(v)
		var want, must []string
		for i := range typ.NumField() {
			f := typ.Field(i)
			if f.Anonymous {
				continue // allOf
			}
			name, options, _ := strings.Cut(f.Tag.Get("json"), ",")
			want = append(want, name)
			if options != "omitempty" {
				must = append(must, name)
			}
		}
		if got := props[typ.Name()]; !slices.Equal(got, want) {
			t.Errorf("schema %s has the properties\n%v, the Go type\n%v", typ.Name(), got, want)
		}
		if got := required[typ.Name()]; !slices.Equal(got, must) {
			t.Errorf("schema %s requires\n%v, the Go type\n%v", typ.Name(), got, must)
		}
		delete(props, typ.Name())
	}
	for name := range props {
		t.Errorf("schema %s has no Go type", name)
	}
}

func TestReferencesOfOpenAPIResolve(t *testing.T) {
	text := string(OpenAPI)
	for _, m := range regexp.MustCompile(`\$ref: '#/components/(\w+)/(\w+)'`).FindAllStringSubmatch(text, -1) {
		_, section, _ := strings.Cut(text, "\n  "+m[1]+":\n")
		if !strings.Contains(section, "    "+m[2]+":\n") {
			t.Errorf("openapi.yaml refers to %s/%s, which is not there", m[1], m[2])
		}
	}
}
