// Package plan is what the nested rig's host side and the init of its L1 machine
// tell each other: the commands to run, and how their output is framed.
package plan

import (
	"encoding/json"
	"fmt"
	"time"
)

// File is where init finds the plan on the root disk of L1.
const File = "/plan.json"

// Command is one program to run in L1.
type Command struct {
	Name    string        `json:"name"`
	Argv    []string      `json:"argv"`
	Dir     string        `json:"dir"`
	Env     []string      `json:"env"`
	Timeout time.Duration `json:"timeout"`
}

// Mark frames the output of a command: a line that begins with [Prefix], then
// this as JSON. Between the first and the second mark of a name is its output.
type Mark struct {
	Name string        `json:"name"`
	End  bool          `json:"end"`
	Exit int           `json:"exit"` // of the program; -1 if it could not run or was killed
	Took time.Duration `json:"took"` // by the clock of L1
	Note string        `json:"note,omitempty"`
}

// Prefix begins the line of a Mark. Programs do not print it.
const Prefix = "\x1enested "

// Line is the mark as a line of output.
func (m Mark) Line() string {
	b, err := json.Marshal(m)
	if err != nil {
		panic(fmt.Sprintf("encode mark: %v", err)) // it has only plain fields
	}
	return Prefix + string(b) + "\n"
}
