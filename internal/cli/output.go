package cli

import (
	"encoding/json"
	"fmt"
	"strings"
	"text/tabwriter"
	"time"
)

// printJSON prints v as the result.
func (a *app) printJSON(v any) error {
	enc := json.NewEncoder(a.env.Stdout)
	enc.SetEscapeHTML(false)
	enc.SetIndent("", "  ")
	return enc.Encode(v)
}

// listing is a result of several objects in its three forms.
type listing struct {
	json   any
	ids    []string
	header []string
	rows   [][]string
}

// list prints a listing in the form that is asked for.
func (a *app) list(l listing) error {
	switch {
	case a.json:
		return a.printJSON(l.json)
	case a.quiet || !a.env.IsTerminal(a.env.Stdout):
		for _, id := range l.ids {
			if _, err := fmt.Fprintln(a.env.Stdout, id); err != nil {
				return err
			}
		}
		return nil
	}
	return a.table(l.header, l.rows)
}

// table prints rows in columns.
func (a *app) table(header []string, rows [][]string) error {
	w := tabwriter.NewWriter(a.env.Stdout, 0, 8, 2, ' ', 0)
	if header != nil {
		fmt.Fprintln(w, strings.Join(header, "\t"))
	}
	for _, row := range rows {
		for i := range row {
			indent := row[i][:len(row[i])-len(strings.TrimLeft(row[i], " "))]
			row[i] = indent + dash(oneLine(row[i]))
		}
		fmt.Fprintln(w, strings.Join(row, "\t"))
	}
	return w.Flush()
}

// oneLine keeps text of guests and daemons from moving the cursor of a terminal.
func oneLine(s string) string {
	return strings.Map(func(r rune) rune {
		switch {
		case r == '\n' || r == '\t' || r == '\r':
			return ' '
		case r < ' ' || (r >= 0x7f && r < 0xa0):
			return -1
		}
		return r
	}, strings.TrimSpace(s))
}

func dash(s string) string {
	if s == "" {
		return "-"
	}
	return s
}

// age says how long ago a Unix time was.
func (a *app) age(unix int64) string {
	d := a.env.Now().Sub(time.Unix(unix, 0))
	switch {
	case d < time.Second:
		return "now"
	case d < time.Minute:
		return fmt.Sprintf("%ds", int(d.Seconds()))
	case d < time.Hour:
		return fmt.Sprintf("%dm", int(d.Minutes()))
	case d < 48*time.Hour:
		return fmt.Sprintf("%dh", int(d.Hours()))
	}
	return fmt.Sprintf("%dd", int(d.Hours()/24))
}

// size says a number of bytes for people.
func size(bytes int64) string {
	switch {
	case bytes < 1<<10:
		return fmt.Sprintf("%d B", bytes)
	case bytes < 1<<20:
		return fmt.Sprintf("%.1f KiB", float64(bytes)/(1<<10))
	case bytes < 1<<30:
		return fmt.Sprintf("%.1f MiB", float64(bytes)/(1<<20))
	}
	return fmt.Sprintf("%.1f GiB", float64(bytes)/(1<<30))
}

// span says a duration for people.
func span(d time.Duration) string {
	if d < time.Second {
		return fmt.Sprintf("%.1f ms", float64(d.Microseconds())/1000)
	}
	return fmt.Sprintf("%.2f s", d.Seconds())
}

func millis(ms float64) string { return span(time.Duration(ms * float64(time.Millisecond))) }
