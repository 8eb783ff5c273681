package kvm

import (
	"os"
	"strings"
)

// lastLine returns the last line of a text file, "" if there is none.
func lastLine(path string) string {
	b, err := os.ReadFile(path)
	if err != nil {
		return ""
	}
	lines := strings.Split(strings.TrimSpace(string(b)), "\n")
	last := lines[len(lines)-1]
	const most = 300
	return last[:min(len(last), most)]
}
