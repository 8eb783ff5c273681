package main

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os/exec"
	"strings"

	"forkd.dev/forkd/test/nested/plan"
)

// reporter turns what init reports into lines of `go test -json`.
type reporter struct {
	out    io.Writer // JSON lines
	echo   io.Writer // the tests' own output
	parts  []part
	failed []string
	ended  bool // init said that all parts have run
}

// follow reads until the port closes.
func (r *reporter) follow(in io.Reader) error {
	sc := bufio.NewScanner(in)
	const longestLine = 16 << 20
	sc.Buffer(nil, longestLine)
	var c *conversion
	for sc.Scan() {
		text, isMark := strings.CutPrefix(sc.Text(), plan.Prefix)
		if !isMark {
			fmt.Fprintln(r.echo, text)
			if c != nil {
				fmt.Fprintln(c, text)
			}
			continue
		}
		var m plan.Mark
		if err := json.Unmarshal([]byte(text), &m); err != nil {
			return fmt.Errorf("read a mark of init: %w", err)
		}
		switch {
		case m.Name == "all":
			r.ended = true
		case !m.End:
			var err error
			if c, err = r.convert(m.Name); err != nil {
				return err
			}
		case c != nil:
			fmt.Fprintf(r.echo, "nested: %s ended with %d after %.1f s %s\n", m.Name, m.Exit, m.Took.Seconds(), m.Note)
			if m.Exit != 0 {
				r.failed = append(r.failed, m.Name)
			}
			c.verdict(m)
			if err := c.close(); err != nil {
				return err
			}
			c = nil
		}
	}
	if c != nil {
		return errors.Join(sc.Err(), c.close())
	}
	return sc.Err()
}

func (r *reporter) verdict() error {
	switch {
	case !r.ended:
		return errors.New("L1 ended before all parts had run")
	case len(r.failed) > 0:
		return fmt.Errorf("failed in L1: %s", strings.Join(r.failed, ", "))
	}
	return nil
}

// conversion is a `go tool test2json` for the output of one part.
type conversion struct {
	io.WriteCloser
	cmd  *exec.Cmd
	test string // the name of the only test, if the part is none itself
}

// verdict ends the output of the part.
func (c *conversion) verdict(m plan.Mark) {
	if m.Exit != 0 {
		fmt.Fprintf(c, "ended with %d after %.1f s: %s\n", m.Exit, m.Took.Seconds(), m.Note)
	}
	switch {
	case c.test != "" && m.Exit == 0:
		fmt.Fprintf(c, "--- PASS: %s (%.2fs)\nPASS\n", c.test, m.Took.Seconds())
	case c.test != "":
		fmt.Fprintf(c, "--- FAIL: %s (%.2fs)\nFAIL\n", c.test, m.Took.Seconds())
	case m.Exit != 0:
		fmt.Fprintln(c, "FAIL")
	}
}

func (r *reporter) convert(name string) (*conversion, error) {
	pkg, isTest := module+"/test/nested/"+name, false
	for _, p := range r.parts {
		if p.name == name && len(p.argv) == 0 {
			pkg, isTest = p.importPath(), true
		}
	}
	cmd := exec.Command("go", "tool", "test2json", "-t", "-p", pkg)
	cmd.Stdout = r.out
	in, err := cmd.StdinPipe()
	if err != nil {
		return nil, err
	}
	if err := cmd.Start(); err != nil {
		return nil, fmt.Errorf("start test2json: %w", err)
	}
	c := &conversion{WriteCloser: in, cmd: cmd}
	if !isTest { // it counts as one
		c.test = name
		fmt.Fprintf(c, "=== RUN   %s\n", name)
	}
	return c, nil
}

func (c *conversion) close() error {
	if err := errors.Join(c.Close(), c.cmd.Wait()); err != nil {
		return fmt.Errorf("convert test output: %w", err)
	}
	return nil
}
