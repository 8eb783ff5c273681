// Command testsummary reads `go test -json` from stdin and prints what a person
// needs: one line per package, the output of what failed, every skipped test with
// its reason, and the count as the last line. It exits with 1 on any failure.
package main

import (
	"fmt"
	"os"
)

func main() {
	failed, err := run(os.Stdin, os.Stdout)
	if err != nil {
		fmt.Fprintln(os.Stderr, "testsummary:", err)
		os.Exit(1)
	}
	if failed {
		os.Exit(1)
	}
}
