package main

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"strings"
)

// event is one line of `go test -json` (see `go doc test2json`).
type event struct {
	Action      string
	Package     string
	ImportPath  string // of build output
	Test        string
	Elapsed     float64
	Output      string
	FailedBuild string
}

type key struct{ pkg, test string }

type summary struct {
	out         io.Writer
	output      map[key][]string
	builds      map[string][]string
	passed      int
	failed      int
	skips       []string
	figures     []string        // what tests logged as "measured: ..."
	failedTests map[string]bool // by package
}

// run copies the gist of in to out and tells whether anything failed.
func run(in io.Reader, out io.Writer) (failed bool, err error) {
	s := &summary{out: out, output: make(map[key][]string), builds: make(map[string][]string), failedTests: make(map[string]bool)}
	sc := bufio.NewScanner(in)
	const longestLine = 16 << 20
	sc.Buffer(nil, longestLine)
	seen := false
	for sc.Scan() {
		var e event
		if json.Unmarshal(sc.Bytes(), &e) != nil || e.Action == "" {
			fmt.Fprintln(out, sc.Text()) // not from a test: show it
			continue
		}
		seen = true
		s.add(e)
	}
	if err := sc.Err(); err != nil {
		return true, fmt.Errorf("read test output: %w", err)
	}
	s.end()
	return s.failed > 0 || !seen, nil
}

func (s *summary) add(e event) {
	k := key{e.Package, e.Test}
	switch e.Action {
	case "output":
		s.output[k] = append(s.output[k], e.Output)
	case "build-output":
		s.builds[e.ImportPath] = append(s.builds[e.ImportPath], e.Output)
	case "pass", "fail", "skip":
		if e.Test == "" {
			s.endPackage(e)
		} else {
			s.endTest(e)
		}
		delete(s.output, k)
	}
}

func (s *summary) endTest(e event) {
	name := short(e.Package) + " " + e.Test
	text := s.output[key{e.Package, e.Test}]
	switch e.Action {
	case "pass":
		s.passed++
		s.figures = append(s.figures, measured(name, text)...)
	case "skip":
		s.skips = append(s.skips, name+": "+reason(text))
	case "fail":
		s.failed++
		s.failedTests[e.Package] = true
		fmt.Fprintf(s.out, "--- FAILED %s (%.1f s)\n%s", name, e.Elapsed, strings.Join(text, ""))
	}
}

func (s *summary) endPackage(e event) {
	switch e.Action {
	case "pass":
		fmt.Fprintf(s.out, "ok    %-34s %6.1f s\n", short(e.Package), e.Elapsed)
	case "fail":
		if !s.failedTests[e.Package] {
			s.failed++ // it did not build, or it died
		}
		text := append(s.builds[e.FailedBuild], s.output[key{pkg: e.Package}]...)
		fmt.Fprintf(s.out, "FAIL  %-34s %6.1f s\n%s", short(e.Package), e.Elapsed, strings.Join(text, ""))
	}
}

func (s *summary) end() {
	// A test that never ended (the process died) has output but no result.
	for k, text := range s.output {
		if k.test != "" {
			s.failed++
			fmt.Fprintf(s.out, "--- DID NOT END %s %s\n%s", short(k.pkg), k.test, strings.Join(text, ""))
		}
	}
	for _, line := range s.figures {
		fmt.Fprintln(s.out, "measured:", line)
	}
	for _, line := range s.skips {
		fmt.Fprintln(s.out, "skipped:", line)
	}
	fmt.Fprintf(s.out, "%d passed, %d failed, %d skipped\n", s.passed, s.failed, len(s.skips))
}

// short drops the module path.
func short(pkg string) string {
	if _, rest, ok := strings.Cut(pkg, "forkd.dev/forkd/"); ok {
		return rest
	}
	return pkg
}

// measured finds the figures that a test logged.
func measured(name string, output []string) []string {
	var out []string
	for _, line := range output {
		if _, figure, ok := strings.Cut(line, ": measured: "); ok {
			out = append(out, name+": "+strings.TrimSpace(figure))
		}
	}
	return out
}

// reason finds what a skipped test said: the line "    file.go:1: text".
func reason(output []string) string {
	var said []string
	for _, line := range output {
		line = strings.TrimSpace(line)
		if line == "" || strings.HasPrefix(line, "===") || strings.HasPrefix(line, "--- SKIP") {
			continue
		}
		if _, text, ok := strings.Cut(line, ".go:"); ok {
			if _, text, ok := strings.Cut(text, ": "); ok {
				line = text
			}
		}
		said = append(said, line)
	}
	if len(said) == 0 {
		return "no reason given"
	}
	return strings.Join(said, " ")
}
