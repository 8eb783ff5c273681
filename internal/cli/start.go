package cli

import (
	"strings"
	"time"

	"github.com/spf13/cobra"

	"forkd.dev/forkd/internal/errdefs"
	forkd "forkd.dev/forkd/sdk/go"
)

// startFlags are the flags of a program that a snapshot keeps running.
type startFlags struct {
	command, ready, readyLog string
	readyPort                int
	readyTimeout             time.Duration
	env                      []string
	cwd, user                string
}

func (s *startFlags) register(cmd *cobra.Command) {
	fl := cmd.Flags()
	fl.StringVar(&s.command, "start", "", "shell command to start last, which runs on in every fork")
	fl.StringVar(&s.ready, "ready", "", "shell command that succeeds once the started one is ready")
	fl.IntVar(&s.readyPort, "ready-port", 0, "port of the guest that accepts connections once it is ready")
	fl.StringVar(&s.readyLog, "ready-log", "", "regular expression that a line of its output matches once it is ready")
	fl.DurationVar(&s.readyTimeout, "ready-timeout", 0, "how long it may take (default 60s)")
	fl.StringArrayVar(&s.env, "env", nil, "environment KEY=VALUE of --start and --ready; recorded in the snapshot (repeatable)")
	fl.StringVar(&s.cwd, "cwd", "", "working directory of --start and --ready")
	fl.StringVar(&s.user, "user", "", "user of --start and --ready: a name or UID[:GID] (default root)")
}

// request is what the flags ask for, nil if nothing is to be started.
func (s *startFlags) request(getenv func(string) string) (*forkd.Start, error) {
	env, err := assignments("env", s.env, getenv)
	if err != nil {
		return nil, err
	}
	if s.command == "" {
		if s.ready != "" || s.readyLog != "" || s.readyPort != 0 || s.readyTimeout != 0 || env != nil || s.cwd != "" || s.user != "" {
			return nil, errdefs.New(errdefs.ErrInvalid, "--ready, --ready-port, --ready-log, --ready-timeout, --env, --cwd and --user belong to --start, which is missing")
		}
		return nil, nil
	}
	return &forkd.Start{
		Command: s.command, Ready: s.ready, ReadyPort: s.readyPort, ReadyLog: s.readyLog,
		ReadyTimeout: s.readyTimeout.Seconds(), Env: env, Cwd: s.cwd, User: s.user,
	}, nil
}

// startText shows a recorded start in one line.
func startText(st *forkd.Start) string {
	if st == nil {
		return ""
	}
	return st.Command
}

// copiesOf reads SRC:DST flags. A source may hold colons, a place in the guest
// may not.
func copiesOf(list []string) ([]forkd.Copy, error) {
	var out []forkd.Copy
	for _, text := range list {
		i := strings.LastIndex(text, ":")
		if i <= 0 || i == len(text)-1 {
			return nil, errdefs.New(errdefs.ErrInvalid, "--copy %.200q is not of the form SRC:DST", text)
		}
		out = append(out, forkd.Copy{From: text[:i], To: text[i+1:]})
	}
	return out, nil
}
