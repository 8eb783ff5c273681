package cli

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/spf13/cobra"

	forkd "forkd.dev/forkd/sdk/go"
)

// Exit codes.
const (
	exitOK          = 0
	exitFailed      = 1
	exitUsage       = 2
	exitNotFound    = 3
	exitPartial     = 4   // some of N failed
	exitNoDaemon    = 5   // or not allowed
	exitCapacity    = 75  // EX_TEMPFAIL: try again later
	exitTimeout     = 124 // as timeout(1)
	exitOwn         = 125 // exec and run: forkd failed, not the program
	exitInterrupted = 130 // Ctrl-C
)

// ownFailure marks commands that pass a program's exit code, so that their own
// failures need a code that programs do not use.
const ownFailure = "forkd.own-failure"

// codeError ends the command with a code of its own. A nil err is silent: all is
// said already, or it is the guest's business.
type codeError struct {
	code int
	err  error
}

func (e *codeError) Error() string {
	if e.err == nil {
		return fmt.Sprintf("exit code %d", e.code)
	}
	return e.err.Error()
}

func (e *codeError) Unwrap() error { return e.err }

// exitWith ends the command silently with code; 0 is no error.
func exitWith(code int) error {
	if code == exitOK {
		return nil
	}
	return &codeError{code: code}
}

// exitCode maps the error of a command to the exit code.
func exitCode(ctx context.Context, cmd *cobra.Command, err error) int {
	var code *codeError
	switch {
	case err == nil:
		return exitOK
	case errors.As(err, &code):
		return code.code
	case ctx.Err() != nil && (errors.Is(err, context.Canceled) || errors.Is(err, forkd.ErrCanceled)):
		return exitInterrupted
	case cmd != nil && cmd.Annotations[ownFailure] != "":
		return exitOwn
	}
	return classCode(err)
}

func classCode(err error) int {
	table := []struct {
		class error
		code  int
	}{
		{forkd.ErrNoDaemon, exitNoDaemon},
		{forkd.ErrPermission, exitNoDaemon},
		{forkd.ErrUnauthenticated, exitNoDaemon},
		{forkd.ErrInvalid, exitUsage},
		{forkd.ErrNotFound, exitNotFound},
		{forkd.ErrResourceExhausted, exitCapacity},
		{forkd.ErrTimeout, exitTimeout},
		{context.DeadlineExceeded, exitTimeout},
	}
	for _, row := range table {
		if errors.Is(err, row.class) {
			return row.code
		}
	}
	return exitFailed
}

// after joins the outcome of a command with that of its clean-up: a failed
// clean-up is always told, and is the error if there is no other.
func (a *app) after(cleanup, err error) error {
	if cleanup == nil || err == nil {
		return errors.Join(cleanup, err)
	}
	a.report(cleanup)
	return err
}

// report prints err for people, unless it is silent.
func (a *app) report(err error) {
	var code *codeError
	if errors.As(err, &code) && code.err == nil {
		return
	}
	text := err.Error()
	if errors.Is(err, context.Canceled) {
		text = "interrupted"
	}
	for i, line := range strings.Split(strings.TrimSpace(text), "\n") {
		prefix := "forkd: "
		if i > 0 {
			prefix = "  " // output of a build that failed, for example
		}
		fmt.Fprintf(a.env.Stderr, "%s%s\n", prefix, oneLine(line))
	}
	if hint := forkd.Hint(err); hint != "" {
		fmt.Fprintf(a.env.Stderr, "hint: %s\n", oneLine(hint))
	}
}
