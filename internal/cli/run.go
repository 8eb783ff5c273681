package cli

import (
	"context"
	"errors"

	"github.com/spf13/cobra"

	"forkd.dev/forkd/internal/errdefs"
	forkd "forkd.dev/forkd/sdk/go"
)

// builtin is the snapshot that is made by itself when it is first asked for.
const builtin = "py-base"

func (a *app) runCommand() *cobra.Command {
	var f execFlags
	var tag string
	cmd := &cobra.Command{
		Use:     "run -- PROGRAM [ARG...]",
		Short:   "Run a program in a fresh sandbox and remove it",
		Long:    "Fork a sandbox, run a program in it, end the sandbox and exit with the program's code.\nIf no daemon runs, a private one is started for this time.",
		Example: "  forkd run -- python3 -c 'import numpy; print(numpy.__version__)'",
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) == 0 {
				return errdefs.New(errdefs.ErrInvalid, "name a program")
			}
			return nil
		},
		Annotations: map[string]string{ownFailure: "yes"},
		RunE: func(cmd *cobra.Command, args []string) error {
			return a.runOnce(cmd.Context(), tag, f, args)
		},
	}
	cmd.Flags().StringVarP(&tag, "tag", "t", builtin, "the snapshot to fork")
	engineFlag(cmd)
	f.register(cmd)
	return cmd
}

func (a *app) runOnce(ctx context.Context, tag string, f execFlags, argv []string) (err error) {
	req, err := a.execRequest(ctx, f, argv)
	if err != nil {
		return err
	}
	c, err := a.clientOrPrivate(ctx)
	if err != nil {
		return err
	}
	made, err := a.forkAll(ctx, c, forkd.ForkRequest{SnapshotTag: tag, N: forkd.Int(1)}, "")
	if err != nil {
		return err
	}
	defer func() { err = a.after(removeAll(ctx, c, ids(made.Sandboxes)), err) }()
	if len(made.Sandboxes) != 1 {
		return errors.New("the daemon answered without a sandbox")
	}
	res, err := c.Exec(ctx, made.Sandboxes[0].ID, req)
	if err != nil {
		return err
	}
	return a.execDone(res)
}

func ids(list []forkd.Sandbox) []string {
	out := make([]string, 0, len(list))
	for _, sb := range list {
		out = append(out, sb.ID)
	}
	return out
}
