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
				fmt.Fprintf(c, "ended with %d after %.1f s: %s\n", m.Exit, m.Took.Seconds(), m.Note)
			}
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
	cmd *exec.Cmd
}

func (r *reporter) convert(name string) (*conversion, error) {
	pkg := name
	for _, p := range r.parts {
		if p.name == name {
			pkg = p.importPath()
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
	return &conversion{WriteCloser: in, cmd: cmd}, nil
}

func (c *conversion) close() error {
	if err := errors.Join(c.Close(), c.cmd.Wait()); err != nil {
		return fmt.Errorf("convert test output: %w", err)
	}
	return nil
}
