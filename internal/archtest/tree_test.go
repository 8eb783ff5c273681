package archtest

import (
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
)

const modulePath = "forkd.dev/forkd"

// source is one parsed Go file of the module.
type source struct {
	path      string // relative to the root, with slashes
	pkg       string // directory
	test      bool
	generated bool
	lines     int
	text      string
	syntax    *ast.File
}

type tree struct {
	root  string
	fset  *token.FileSet
	files []*source
}

// module parses the module once for all tests.
var module = sync.OnceValues(func() (*tree, error) {
	root, err := filepath.Abs("../..")
	if err != nil {
		return nil, err
	}
	t := &tree{root: root, fset: token.NewFileSet()}
	return t, filepath.WalkDir(root, t.visit)
})

func loadTree(t *testing.T) *tree {
	t.Helper()
	m, err := module()
	if err != nil {
		t.Fatal(err)
	}
	if len(m.files) == 0 {
		t.Fatal("no Go file found")
	}
	return m
}

func (t *tree) visit(file string, e fs.DirEntry, err error) error {
	if err != nil {
		return err
	}
	name := e.Name()
	if e.IsDir() {
		if file != t.root && (strings.HasPrefix(name, ".") || name == "testdata" || name == "node_modules" || name == "bin") {
			return fs.SkipDir
		}
		return nil
	}
	if !strings.HasSuffix(name, ".go") {
		return nil
	}
	b, err := os.ReadFile(file)
	if err != nil {
		return err
	}
	syntax, err := parser.ParseFile(t.fset, file, b, parser.ParseComments|parser.SkipObjectResolution)
	if err != nil {
		return err
	}
	rel, err := filepath.Rel(t.root, file)
	if err != nil {
		return err
	}
	rel = filepath.ToSlash(rel)
	t.files = append(t.files, &source{
		path: rel, pkg: path.Dir(rel), test: strings.HasSuffix(name, "_test.go"),
		generated: ast.IsGenerated(syntax), lines: strings.Count(string(b), "\n"), text: string(b), syntax: syntax,
	})
	return nil
}

// code returns the files people wrote that are not tests.
func (t *tree) code() []*source {
	return slices.DeleteFunc(slices.Clone(t.files), func(s *source) bool { return s.test || s.generated })
}

// written returns the files people wrote, tests included.
func (t *tree) written() []*source {
	return slices.DeleteFunc(slices.Clone(t.files), func(s *source) bool { return s.generated })
}

func (t *tree) line(pos token.Pos) int { return t.fset.Position(pos).Line }

func (s *source) imports() []string {
	var out []string
	for _, i := range s.syntax.Imports {
		out = append(out, strings.Trim(i.Path.Value, `"`))
	}
	return out
}

// importsInside returns the module's own packages that s imports, as directories.
func (s *source) importsInside() []string {
	var out []string
	for _, i := range s.imports() {
		if rest, ok := strings.CutPrefix(i, modulePath+"/"); ok {
			out = append(out, rest)
		}
	}
	return out
}
