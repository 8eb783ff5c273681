package doctor

import (
	"fmt"
	"io"
	"strings"
)

// Status is the verdict of a check.
type Status string

// The verdicts. Fail means that forkd cannot do its main job here; Warn that
// something is lost; Skip that there was nothing to judge.
const (
	Pass Status = "pass"
	Warn Status = "warn"
	Fail Status = "fail"
	Skip Status = "skip"
)

// Check is one fact with its verdict. Remedy is one line, and not empty unless the
// status is Pass.
type Check struct {
	Name   string `json:"name"`
	Status Status `json:"status"`
	Detail string `json:"detail"`
	Remedy string `json:"remedy"`
}

// Choice is the engine that "auto" means here. Auto is empty if there is none.
type Choice struct {
	Auto   string `json:"auto"`
	Reason string `json:"reason"`
	// Setting is the engine that is set instead, or "".
	Setting string `json:"setting,omitempty"`

	remedy string
}

// Report is the result: {"engine":{"auto","reason"},"checks":[{"name","status","detail","remedy"}]}; the
// engine has a "setting" as well if one is set. Each engine has a check of its own.
type Report struct {
	Engine Choice  `json:"engine"`
	Checks []Check `json:"checks"`
}

// Failed tells whether any check failed.
func (r Report) Failed() bool { return r.count(Fail) > 0 }

func (r Report) count(s Status) int {
	n := 0
	for _, c := range r.Checks {
		if c.Status == s {
			n++
		}
	}
	return n
}

// WriteText renders the report for people.
func (r Report) WriteText(w io.Writer) error {
	width := 0
	for _, c := range r.Checks {
		width = max(width, len(c.Name))
	}
	var b strings.Builder
	for _, c := range r.Checks {
		fmt.Fprintf(&b, "%-4s  %-*s  %s\n", strings.ToUpper(string(c.Status)), width, c.Name, c.Detail)
		if c.Remedy != "" {
			fmt.Fprintf(&b, "      %-*s  -> %s\n", width, "", c.Remedy)
		}
	}
	auto := r.Engine.Auto
	if auto == "" {
		auto = "none"
	}
	fmt.Fprintf(&b, "\nengine auto: %s (%s)\n", auto, r.Engine.Reason)
	if r.Engine.Setting != "" {
		fmt.Fprintf(&b, "engine set:  %s\n", r.Engine.Setting)
	}
	fmt.Fprintf(&b, "%d passed, %d warnings, %d failed, %d skipped\n",
		r.count(Pass), r.count(Warn), r.count(Fail), r.count(Skip))
	if _, err := io.WriteString(w, b.String()); err != nil {
		return fmt.Errorf("write report: %w", err)
	}
	return nil
}
