package archtest

import (
	"go/ast"
	"go/token"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// The budgets of STYLE R1, R2 and R6; the goals are 400 and 50 lines.
const (
	maxFileLines     = 600
	maxFunctionLines = 80
	maxMainLines     = 40
	maxParameters    = 5 // ctx included
)

func TestPackageDocs(t *testing.T) {
	docs := make(map[string]string)
	names := make(map[string]string)
	for _, f := range loadTree(t).code() {
		names[f.pkg] = f.syntax.Name.Name
		if f.syntax.Doc != nil {
			docs[f.pkg] += f.syntax.Doc.Text()
		}
	}
	for pkg, name := range names {
		want := "Package " + name + " "
		if name == "main" {
			want = "Command " + path.Base(pkg) + " "
		}
		if !strings.Contains(docs[pkg], want) {
			t.Errorf("package %s: no package comment that starts with %q", pkg, want)
		}
	}
}

func TestSizes(t *testing.T) {
	tree := loadTree(t)
	for _, f := range tree.written() {
		if f.lines > maxFileLines {
			t.Errorf("%s has %d lines, more than %d", f.path, f.lines, maxFileLines)
		}
		if strings.HasPrefix(f.path, "cmd/") && path.Base(f.path) == "main.go" && f.lines > maxMainLines {
			t.Errorf("%s has %d lines, more than %d: main only calls run", f.path, f.lines, maxMainLines)
		}
		if f.test {
			continue // tables and stories
		}
		for _, d := range f.syntax.Decls {
			fn, ok := d.(*ast.FuncDecl)
			if !ok || fn.Body == nil || exempt(fn.Doc) {
				continue
			}
			if n := tree.line(fn.End()) - tree.line(fn.Pos()) + 1; n > maxFunctionLines {
				t.Errorf("%s:%d: %s has %d lines, more than %d", f.path, tree.line(fn.Pos()), fn.Name.Name, n, maxFunctionLines)
			}
			if n := fn.Type.Params.NumFields(); fn.Name.IsExported() && n > maxParameters {
				t.Errorf("%s:%d: %s has %d parameters, more than %d: make them a struct", f.path, tree.line(fn.Pos()), fn.Name.Name, n, maxParameters)
			}
		}
	}
}

// exempt tells whether a function says with "archtest:table REASON" that it is a table.
func exempt(doc *ast.CommentGroup) bool {
	if doc == nil {
		return false
	}
	for _, c := range doc.List {
		if rest, ok := strings.CutPrefix(c.Text, "//archtest:table "); ok && len(rest) > 0 {
			return true
		}
	}
	return false
}

func TestNames(t *testing.T) {
	banned := []string{"util", "utils", "common", "type", "types", "helper", "helpers", "manager", "misc", "shared", "lib"}
	for _, f := range loadTree(t).written() {
		if slices.Contains(banned, strings.TrimSuffix(f.syntax.Name.Name, "_test")) {
			t.Errorf("%s: package name %s says nothing", f.path, f.syntax.Name.Name)
		}
	}
}

func TestUnsafeAndSystemCalls(t *testing.T) {
	tree := loadTree(t)
	l := loadLayers(t, tree.root)
	for _, f := range tree.written() {
		inside := covers("internal/linux/...", f.pkg) || covers("internal/vmm/...", f.pkg)
		if slices.Contains(f.imports(), "unsafe") {
			if !inside || !strings.Contains(path.Base(f.path), "_unsafe") {
				t.Errorf("%s uses unsafe: that stands in *_unsafe.go files of internal/linux and internal/vmm", f.path)
			}
			if !f.test && !strings.Contains(f.text, "SAFETY") {
				t.Errorf("%s uses unsafe without a SAFETY comment", f.path)
			}
		}
		if f.test {
			continue
		}
		raw := regexp.MustCompile(`\b(unix|syscall)\.(Raw)?Syscall6?\(`)
		if !inside && raw.MatchString(f.text) {
			t.Errorf("%s makes a raw system call: put a typed function into internal/linux", f.path)
		}
		if slices.Contains(f.imports(), "golang.org/x/sys/unix") && !slices.ContainsFunc(l.unix, func(p string) bool { return covers(p, f.pkg) }) {
			t.Errorf("%s uses x/sys/unix: put a typed function into internal/linux, or add a unix line with the reason to layers.txt", f.path)
		}
	}
}

// TestBannedCalls finds calls for which there is a better way.
func TestBannedCalls(t *testing.T) {
	printing := func(f *source) bool {
		return covers("internal/cli/...", f.pkg) || covers("cmd/...", f.pkg) || covers("scripts/...", f.pkg) ||
			covers("bench/...", f.pkg) || covers("examples/...", f.pkg)
	}
	never := func(*source) bool { return false }
	for _, rule := range []struct {
		call  *regexp.Regexp
		fine  func(*source) bool
		why   string
		tests bool
	}{
		{regexp.MustCompile(`\bfmt\.Print(f|ln)?\(`), printing, "output belongs to the command line", false},
		{regexp.MustCompile(`\blog\.(Print|Fatal|Panic)`), never, "return the error, or log with the logger you were given", true},
		{regexp.MustCompile(`\bos\.Is(Exist|NotExist|Permission|Timeout)\(`), never, "errors.Is with fs.ErrExist and so on sees through wrapping", true},
		{regexp.MustCompile(`strings\.(Contains|HasPrefix|HasSuffix)\(\w*[eE]rr\.Error\(\)`), never, "errors are told apart by errors.Is, not by their text", false},
		{regexp.MustCompile(`\btime\.Sleep\(`), func(f *source) bool { return !f.test }, "wait for the event", true},
		{regexp.MustCompile(`(?m)^func init\(\)`), never, "no init: constructors return working objects", true},
	} {
		for _, f := range loadTree(t).written() {
			if f.pkg == "internal/archtest" || (f.test && !rule.tests) || rule.fine(f) {
				continue
			}
			if at := rule.call.FindStringIndex(f.text); at != nil {
				t.Errorf("%s:%d: %s: %s", f.path, 1+strings.Count(f.text[:at[0]], "\n"), f.text[at[0]:at[1]], rule.why)
			}
		}
	}
}

func TestComments(t *testing.T) {
	tree := loadTree(t)
	history := regexp.MustCompile(`(^|[^&\w])#[0-9]+\b|\b20[0-9]{2}-[01][0-9]-[0-3][0-9]\b`)
	for _, f := range tree.written() {
		for _, group := range f.syntax.Comments {
			for _, c := range group.List {
				if found := history.FindString(c.Text); found != "" {
					t.Errorf("%s:%d: comment holds %q: issue numbers and dates belong to git", f.path, tree.line(c.Pos()), strings.TrimSpace(found))
				}
			}
		}
	}
}

// TestExportedDocs: what a package offers says its contract.
func TestExportedDocs(t *testing.T) {
	tree := loadTree(t)
	for _, f := range tree.code() {
		if f.syntax.Name.Name == "main" {
			continue
		}
		for _, d := range f.syntax.Decls {
			if fn, ok := d.(*ast.FuncDecl); ok && fn.Recv == nil && fn.Name.IsExported() && fn.Doc == nil {
				t.Errorf("%s:%d: exported %s has no comment", f.path, tree.line(fn.Pos()), fn.Name.Name)
			}
			if g, ok := d.(*ast.GenDecl); ok && g.Tok == token.TYPE && g.Doc == nil {
				for _, s := range g.Specs {
					if ts := s.(*ast.TypeSpec); ts.Name.IsExported() && ts.Doc == nil {
						t.Errorf("%s:%d: exported type %s has no comment", f.path, tree.line(ts.Pos()), ts.Name.Name)
					}
				}
			}
		}
	}
}

func TestReadmeNamesTopFolders(t *testing.T) {
	root := loadTree(t).root
	readme, err := os.ReadFile(filepath.Join(root, "README.md"))
	if err != nil {
		t.Fatal(err)
	}
	entries, err := os.ReadDir(root)
	if err != nil {
		t.Fatal(err)
	}
	ignored := []string{"bin"} // not in the repository
	for _, e := range entries {
		if !e.IsDir() || strings.HasPrefix(e.Name(), ".") || slices.Contains(ignored, e.Name()) {
			continue
		}
		if !strings.Contains(string(readme), "`"+e.Name()+"/") {
			t.Errorf("README.md does not name the folder `%s/`", e.Name())
		}
	}
}

// TestSpecificationProves: a promise names what shows it, or says "pending".
func TestSpecificationProves(t *testing.T) {
	b, err := os.ReadFile(filepath.Join(loadTree(t).root, "SPECIFICATION.md"))
	if err != nil {
		t.Fatal(err)
	}
	rows, shown := 0, regexp.MustCompile("pending|`[^`]+`")
	for i, line := range strings.Split(string(b), "\n") {
		if !strings.HasPrefix(line, "| P") {
			continue
		}
		rows++
		cells := strings.Split(strings.Trim(line, "| "), "|")
		if !shown.MatchString(cells[len(cells)-1]) {
			t.Errorf("SPECIFICATION.md:%d: the promise names no test or command and is not pending", i+1)
		}
	}
	if rows == 0 {
		t.Error("SPECIFICATION.md has no promises (rows that start with | P)")
	}
}
