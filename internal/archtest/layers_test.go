package archtest

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

type family struct {
	pattern string
	layer   int
}

type exception struct{ from, to string }

// layering is what layers.txt says.
type layering struct {
	layers   []string
	families []family
	also     []exception
	only     []exception
	unix     []string
}

func parseLayers(text string) (*layering, error) {
	l := &layering{}
	for i, line := range strings.Split(text, "\n") {
		line, _, _ = strings.Cut(line, "#")
		if strings.TrimSpace(line) == "" {
			continue
		}
		if err := l.add(strings.TrimSpace(line)); err != nil {
			return nil, fmt.Errorf("layers.txt:%d: %w", i+1, err)
		}
	}
	return l, nil
}

func (l *layering) add(line string) error {
	word, rest, _ := strings.Cut(line, " ")
	rest = strings.TrimSpace(rest)
	switch word {
	case "layer":
		l.layers = append(l.layers, rest)
	case "also":
		edge, reason, _ := strings.Cut(rest, ":")
		from, to, ok := strings.Cut(edge, "->")
		if !ok || strings.TrimSpace(reason) == "" {
			return errors.New("want: also FROM -> TO: REASON")
		}
		l.also = append(l.also, exception{strings.TrimSpace(from), strings.TrimSpace(to)})
	case "only":
		to, from, ok := strings.Cut(rest, "<-")
		if !ok {
			return errors.New("want: only PACKAGE <- IMPORTER")
		}
		l.only = append(l.only, exception{strings.TrimSpace(from), strings.TrimSpace(to)})
	case "unix":
		pattern, reason, _ := strings.Cut(rest, ":")
		if strings.TrimSpace(reason) == "" {
			return errors.New("want: unix PATTERN: REASON")
		}
		l.unix = append(l.unix, strings.TrimSpace(pattern))
	default:
		if len(l.layers) == 0 {
			return errors.New("a package before the first layer")
		}
		l.families = append(l.families, family{pattern: word, layer: len(l.layers) - 1})
	}
	return nil
}

// find returns the first family that covers pkg.
func (l *layering) find(pkg string) (family, bool) {
	for _, f := range l.families {
		if covers(f.pattern, pkg) {
			return f, true
		}
	}
	return family{}, false
}

func covers(pattern, pkg string) bool {
	if base, ok := strings.CutSuffix(pattern, "/..."); ok {
		return pkg == base || strings.HasPrefix(pkg, base+"/")
	}
	return pkg == pattern
}

// check says why from may not import to, or "".
func (l *layering) check(from, to string) string {
	for _, o := range l.only {
		if covers(o.to, to) && !covers(o.to, from) && !covers(o.from, from) {
			return "only " + o.from + " may"
		}
	}
	for _, a := range l.also {
		if covers(a.from, from) && covers(a.to, to) {
			return ""
		}
	}
	a, ok1 := l.find(from)
	b, ok2 := l.find(to)
	switch {
	case !ok1 || !ok2:
		return "" // reported as unlisted
	case a.pattern == b.pattern, b.layer < a.layer:
		return ""
	case a.layer == b.layer:
		return "both are of layer " + l.layers[a.layer] + " and do not know each other"
	}
	return "layer " + l.layers[a.layer] + " is below layer " + l.layers[b.layer]
}

func loadLayers(t *testing.T, root string) *layering {
	t.Helper()
	b, err := os.ReadFile(filepath.Join(root, "layers.txt"))
	if err != nil {
		t.Fatal(err)
	}
	l, err := parseLayers(string(b))
	if err != nil {
		t.Fatal(err)
	}
	return l
}

func TestLayers(t *testing.T) {
	tree := loadTree(t)
	l := loadLayers(t, tree.root)
	reported := make(map[string]bool)
	for _, f := range tree.files {
		if _, ok := l.find(f.pkg); !ok && !reported[f.pkg] {
			reported[f.pkg] = true
			t.Errorf("package %s is in no layer: add it to layers.txt", f.pkg)
		}
		if f.test {
			continue // tests may join what they prove
		}
		for _, to := range f.importsInside() {
			if why := l.check(f.pkg, to); why != "" {
				t.Errorf("%s imports %s: %s", f.path, to, why)
			}
		}
	}
}

func TestLayerRules(t *testing.T) {
	l, err := parseLayers(`
layer low
  a
layer mid   # comment
  b/...
  c
layer high
  d
also c -> d: because
only b/... <- d
`)
	if err != nil {
		t.Fatal(err)
	}
	for edge, allowed := range map[[2]string]bool{
		{"b", "a"}:   true,
		{"b/x", "b"}: true,
		{"a", "b"}:   false,
		{"b", "c"}:   false,
		{"c", "b"}:   false,
		{"c", "d"}:   true,
		{"d", "b/x"}: true,
		{"d", "c"}:   true,
	} {
		if why := l.check(edge[0], edge[1]); (why == "") != allowed {
			t.Errorf("%s -> %s: %q, want allowed=%v", edge[0], edge[1], why, allowed)
		}
	}
	if _, ok := l.find("bx"); ok {
		t.Error("b/... covers bx")
	}
	for _, bad := range []string{"x", "layer l\nalso a -> b", "layer l\nunix a", "layer l\nonly a"} {
		if _, err := parseLayers(bad); err == nil {
			t.Errorf("layers %q are accepted", bad)
		}
	}
}
