package cli

import (
	"context"
	"fmt"
	"io"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"forkd.dev/forkd/api/rest"
	"forkd.dev/forkd/internal/errdefs"
	forkd "forkd.dev/forkd/sdk/go"
)

func (a *app) diffCommand() *cobra.Command {
	var req forkd.DiffRequest
	cmd := &cobra.Command{
		Use:     "diff A B",
		Aliases: []string{"snapshot-diff"},
		Short:   "Compare two snapshots, checkpoints or running sandboxes",
		Long: "List the files that were added, changed or removed from A to B, and the processes and memory of both. A running sandbox\n" +
			"is captured first and goes on. Both are restored into throw-away machines in which nothing of the user runs, so neither changes.\n" +
			"With --patch the differences of text files are printed instead, as diff -u does.",
		Example:           "  forkd diff py-base worker\n  forkd diff worker before-the-risky-step --patch",
		Args:              cobra.ExactArgs(2),
		ValidArgsFunction: a.completeMany(a.snapshotNames, a.sandboxNames),
		RunE: func(cmd *cobra.Command, args []string) error {
			req.A, req.B = args[0], args[1]
			return a.diff(cmd.Context(), req)
		},
	}
	fl := cmd.Flags()
	fl.BoolVarP(&req.Patch, "patch", "p", false, "print the differences of text files")
	fl.StringArrayVar(&req.Exclude, "exclude", nil, "directory to leave out, as /tmp (repeatable)")
	return cmd
}

func (a *app) diff(ctx context.Context, req forkd.DiffRequest) error {
	c, err := a.client()
	if err != nil {
		return err
	}
	p := a.progress()
	p.step("comparing "+req.A+" with "+req.B, -1)
	d, err := c.Diff(ctx, req, p.step)
	p.done()
	switch {
	case err != nil:
		return err
	case a.json:
		return a.printJSON(d)
	case req.Patch:
		return a.printPatch(d)
	}
	return a.printDiff(d)
}

// letter is what diffs are marked by everywhere.
func letter(kind string) string {
	switch kind {
	case "added":
		return "A"
	case "removed":
		return "D"
	}
	return "M"
}

func (a *app) printDiff(d forkd.Diff) error {
	for _, w := range d.Warnings {
		a.note(oneLine(w))
	}
	tty := a.env.IsTerminal(a.env.Stdout) && !a.quiet
	rows := [][]string{}
	for _, c := range d.Changes {
		path := oneLine(c.Path)
		if c.Type == "dir" {
			path += "/"
		}
		if !tty {
			if _, err := fmt.Fprintf(a.env.Stdout, "%s %s\n", letter(c.Kind), path); err != nil {
				return err
			}
			continue
		}
		sizes := ""
		switch {
		case c.Type != "file":
		case c.Kind == "added":
			sizes = size(c.SizeB)
		case c.Kind == "removed":
			sizes = size(c.SizeA)
		case c.SizeA != c.SizeB:
			sizes = size(c.SizeA) + " -> " + size(c.SizeB)
		}
		rows = append(rows, []string{letter(c.Kind), path, strings.Join(c.What, ", "), sizes})
	}
	if tty && len(rows) > 0 {
		if err := a.table([]string{"", "FILE", "WHAT", "SIZE"}, rows); err != nil {
			return err
		}
	}
	if d.Truncated {
		a.note("there are more changes than are listed")
	}
	if !tty {
		return nil
	}
	return a.printSides(d)
}

// printSides tells of processes and memory.
func (a *app) printSides(d forkd.Diff) error {
	if len(d.Changes) > 0 {
		fmt.Fprintln(a.env.Stdout)
	}
	rows := [][]string{}
	for _, s := range []struct {
		name string
		rest.DiffSide
	}{{"A", d.A}, {"B", d.B}} {
		used := max(s.MemoryTotalKiB-s.MemoryAvailableKiB, 0)
		rows = append(rows, []string{s.name, s.SnapshotID, strconv.Itoa(s.Files), strconv.Itoa(s.Processes), size(used << 10), size(s.MemoryTotalKiB << 10)})
	}
	if err := a.table([]string{"", "STATE", "FILES", "PROCESSES", "USED MEMORY", "MEMORY"}, rows); err != nil {
		return err
	}
	changed := [][]string{}
	for _, p := range d.ProcessesRemoved {
		changed = append(changed, []string{"D", strconv.Itoa(p.PID), size(p.RSSKiB << 10), oneLine(p.Command)})
	}
	for _, p := range d.ProcessesAdded {
		changed = append(changed, []string{"A", strconv.Itoa(p.PID), size(p.RSSKiB << 10), oneLine(p.Command)})
	}
	if len(changed) == 0 {
		return nil
	}
	fmt.Fprintln(a.env.Stdout)
	return a.table([]string{"", "PID", "MEMORY", "PROCESS"}, changed)
}

// printPatch prints what can be applied; on a terminal without what would move the
// cursor.
func (a *app) printPatch(d forkd.Diff) error {
	text := d.Patch
	if a.env.IsTerminal(a.env.Stdout) {
		var b strings.Builder
		for line := range strings.Lines(text) {
			b.WriteString(strings.Map(visible, line))
		}
		text = b.String()
	}
	if _, err := io.WriteString(a.env.Stdout, text); err != nil {
		return errdefs.New(errdefs.ErrInternal, "write patch: %w", err)
	}
	if d.PatchSkipped > 0 {
		a.note(fmt.Sprintf("%d files differ that are no text, or too large for a patch", d.PatchSkipped))
	}
	return nil
}

// visible drops control characters but tabs and line ends.
func visible(r rune) rune {
	if r < ' ' && r != '\t' && r != '\n' || r >= 0x7f && r < 0xa0 {
		return -1
	}
	return r
}
