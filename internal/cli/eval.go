package cli

import (
	"context"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"forkd.dev/forkd/internal/errdefs"
	forkd "forkd.dev/forkd/sdk/go"
)

func (a *app) evalCommand() *cobra.Command {
	var limit time.Duration
	var language string
	cmd := &cobra.Command{
		Use:   "eval SANDBOX CODE",
		Short: "Run code in a sandbox's warm interpreter",
		Long: "Run code in the warm interpreter of a sandbox. Its state stays from one eval to the next.\n" +
			"What the code prints goes to standard output, then the value of its last expression.\nCODE - reads the code from standard input.",
		Example: "  forkd eval sb1a2b \"import sys; print(sys.version)\"",
		Args:    cobra.ExactArgs(2),
		RunE: func(cmd *cobra.Command, args []string) error {
			timeout, err := seconds(limit)
			if err != nil {
				return err
			}
			code, err := a.code(cmd.Context(), args[1])
			if err != nil {
				return err
			}
			c, err := a.client()
			if err != nil {
				return err
			}
			res, err := c.Eval(cmd.Context(), args[0], forkd.EvalRequest{Code: code, TimeoutSecs: timeout, Language: language})
			if err != nil {
				return err
			}
			return a.evalDone(res)
		},
	}
	cmd.Flags().DurationVar(&limit, "timeout", 0, "interrupt the code after this time (default 30s)")
	cmd.Flags().StringVar(&language, "language", "", "the interpreter (default python)")
	return cmd
}

// code returns the text to evaluate; "-" is standard input.
func (a *app) code(ctx context.Context, arg string) (string, error) {
	if arg != "-" {
		return arg, nil
	}
	raw, err := a.readStdin(ctx)
	if err == nil && raw == nil {
		err = errdefs.New(errdefs.ErrInvalid, "there is no code on standard input")
	}
	return string(raw), err
}

func (a *app) evalDone(res forkd.EvalResult) error {
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
	if res.Result != nil {
		fmt.Fprintln(a.env.Stdout, *res.Result)
	}
	if res.Error != nil {
		text := strings.TrimRight(res.Traceback, "\n")
		if text == "" {
			text = *res.Error
		}
		fmt.Fprintln(a.env.Stderr, text)
	}
	if res.TimedOut {
		a.note("the code did not end in time and was interrupted")
	}
	if res.RunnerRestarted {
		a.note("the interpreter had to be restarted: what earlier evals left in it is lost")
	}
	if res.Truncated {
		a.note("output over the limit was dropped")
	}
	return exitWith(code)
}

// note says something about a result on standard error.
func (a *app) note(text string) { fmt.Fprintf(a.env.Stderr, "forkd: %s\n", text) }

func (a *app) pingCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "ping SANDBOX",
		Short: "Ask the agent of a sandbox what it is",
		Args:  cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			c, err := a.client()
			if err != nil {
				return err
			}
			start := time.Now()
			p, err := c.Ping(cmd.Context(), args[0])
			if err != nil {
				return err
			}
			if a.json {
				return a.printJSON(p)
			}
			return a.table(nil, [][]string{
				{"round trip", span(time.Since(start))},
				{"agent", p.AgentVersion + ", protocol " + strconv.Itoa(p.ProtocolVersion)},
				{"up", millis(p.UptimeMS)},
				{"warm", strconv.FormatBool(p.WarmupReady)},
				{"runners", strings.Join(p.Runners, ", ")},
				{"python", p.PythonVersion},
				{"numpy", p.NumpyVersion},
				{"generation", strconv.FormatUint(p.Generation, 10)},
			})
		},
	}
}
