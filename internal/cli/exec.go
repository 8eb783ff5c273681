package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"time"

	"github.com/spf13/cobra"

	"forkd.dev/forkd/internal/errdefs"
	forkd "forkd.dev/forkd/sdk/go"
)

const (
	// maxStdin is what one exec request can carry.
	maxStdin = 20 << 20
	// cleanUpTime bounds the removal of what a command made for itself.
	cleanUpTime = 30 * time.Second
)

// execFlags are the flags that exec and run share.
type execFlags struct {
	timeout time.Duration
	env     []string
	cwd     string
	user    string
	stdin   bool
}

func (f *execFlags) register(cmd *cobra.Command) {
	fl := cmd.Flags()
	fl.DurationVar(&f.timeout, "timeout", 0, "end the program after this time (default 30s)")
	fl.StringArrayVarP(&f.env, "env", "e", nil, "environment KEY=VALUE, or KEY to pass on (repeatable)")
	fl.StringVar(&f.cwd, "cwd", "", "directory to run in (default the user's home)")
	fl.StringVarP(&f.user, "user", "u", "", "user name or uid[:gid] (default root)")
	fl.BoolVar(&f.stdin, "stdin", true, "pass standard input if it is a pipe or a file")
}

func (a *app) execCommand() *cobra.Command {
	var f execFlags
	var checkpoint bool
	cmd := &cobra.Command{
		Use:     "exec SANDBOX -- PROGRAM [ARG...]",
		Short:   "Run a program in a sandbox",
		Long:    "Run a program in a sandbox and exit with its code (128+n for signal n, 124 after a time-out, 125 if forkd itself failed).",
		Example: "  forkd exec sb1a2b -- python3 -c 'print(1)'\n  echo hello | forkd exec sb1a2b -- cat",
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) < 2 {
				return errdefs.New(errdefs.ErrInvalid, "name a sandbox and a program")
			}
			return nil
		},
		Annotations: map[string]string{ownFailure: "yes"},
		RunE: func(cmd *cobra.Command, args []string) error {
			c, err := a.client()
			if err != nil {
				return err
			}
			req, err := a.execRequest(cmd.Context(), f, args[1:])
			if err != nil {
				return err
			}
			req.Checkpoint = checkpoint
			res, err := c.Exec(cmd.Context(), args[0], req)
			if err != nil {
				return err
			}
			if res.CheckpointID != "" && !a.json {
				a.note(fmt.Sprintf("checkpoint %s; go back with: forkd rollback %s %s", res.CheckpointID, args[0], res.CheckpointID))
			}
			return a.execDone(res)
		},
	}
	f.register(cmd)
	cmd.Flags().BoolVar(&checkpoint, "checkpoint", false, "make a checkpoint before, and tell its id")
	return cmd
}

// execRequest collects what the program gets, standard input included.
func (a *app) execRequest(ctx context.Context, f execFlags, argv []string) (forkd.ExecRequest, error) {
	var zero forkd.ExecRequest
	env, err := assignments("env", f.env, a.env.Getenv)
	if err != nil {
		return zero, err
	}
	timeout, err := seconds(f.timeout)
	if err != nil {
		return zero, err
	}
	req := forkd.ExecRequest{Args: argv, Env: env, Cwd: f.cwd, User: f.user, TimeoutSecs: timeout}
	if f.stdin {
		if req.StdinBase64, err = a.readStdin(ctx); err != nil {
			return zero, err
		}
	}
	return req, nil
}

// readStdin reads all of a piped standard input. A terminal, a device or nothing
// gives nil. The reader is left behind if ctx ends first: a read of a pipe cannot
// be taken back.
func (a *app) readStdin(ctx context.Context) ([]byte, error) {
	if !piped(a.env.Stdin) {
		return nil, nil
	}
	p := a.progress()
	defer p.done()
	p.step("reading standard input (--stdin=false leaves it out)", -1)
	type result struct {
		data []byte
		err  error
	}
	got := make(chan result, 1)
	go func() {
		data, err := io.ReadAll(io.LimitReader(a.env.Stdin, maxStdin+1))
		got <- result{data, err}
	}()
	select {
	case r := <-got:
		switch {
		case r.err != nil:
			return nil, errdefs.New(errdefs.ErrInternal, "read standard input: %w", r.err)
		case len(r.data) > maxStdin:
			return nil, errdefs.WithHint(errdefs.New(errdefs.ErrInvalid, "standard input is larger than %s", size(maxStdin)), "copy it into the sandbox in parts")
		case len(r.data) == 0:
			return nil, nil
		}
		return r.data, nil
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// piped tells whether in is a pipe, a socket or a file rather than a device.
func piped(in io.Reader) bool {
	if in == nil {
		return false
	}
	f, ok := in.(*os.File)
	if !ok {
		return true
	}
	info, err := f.Stat()
	return err == nil && (info.Mode().IsRegular() || info.Mode()&os.ModeNamedPipe != 0)
}

// execDone passes on what a program wrote and how it ended.
func (a *app) execDone(res forkd.ExecResult) error {
	code := res.ExitCode
	if res.TimedOut {
		code = exitTimeout
	}
	if a.json {
		if err := a.printJSON(res); err != nil {
			return err
		}
		return exitWith(code)
	}
	if err := a.pass(res.StdoutBytes(), res.StderrBytes()); err != nil {
		return err
	}
	switch {
	case res.TimedOut:
		a.note("the program did not end in time and was killed")
	case res.OOMKilled:
		a.note("the program was killed for lack of memory in the sandbox")
	}
	if res.Truncated {
		a.note("output over the limit was dropped")
	}
	return exitWith(code)
}

// pass writes a guest's output unchanged.
func (a *app) pass(stdout, stderr []byte) error {
	_, outErr := a.env.Stdout.Write(stdout)
	_, errErr := a.env.Stderr.Write(stderr)
	return errors.Join(outErr, errErr)
}
