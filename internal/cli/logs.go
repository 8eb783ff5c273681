package cli

import (
	"io"
	"unicode/utf8"

	"github.com/spf13/cobra"

	"forkd.dev/forkd/internal/errdefs"
	forkd "forkd.dev/forkd/sdk/go"
)

func (a *app) logsCommand() *cobra.Command {
	var follow, console, build bool
	cmd := &cobra.Command{
		Use:   "logs SANDBOX|SNAPSHOT|IMAGE",
		Short: "Show the console of a sandbox, or how a snapshot or an image was built",
		Long: "Show what the kernel of a sandbox printed, or what the build of a snapshot or an image did and printed.\n" +
			"A build under way is found by the name it will have.",
		Example:           "  forkd logs -f worker\n  forkd logs --build py-base",
		Args:              cobra.ExactArgs(1),
		ValidArgsFunction: a.completeOne(a.sandboxNames, a.snapshotNames, a.imageNames),
		RunE: func(cmd *cobra.Command, args []string) error {
			o := forkd.LogOptions{Follow: follow}
			switch {
			case console && build:
				return errdefs.New(errdefs.ErrInvalid, "--console and --build exclude each other")
			case console:
				o.Kind = forkd.LogConsole
			case build:
				o.Kind = forkd.LogBuild
			}
			c, err := a.client()
			if err != nil {
				return err
			}
			to := a.env.Stdout
			if a.env.IsTerminal(to) {
				to = &harmless{w: to}
			}
			return c.Logs(cmd.Context(), args[0], o, to)
		},
	}
	cmd.Flags().BoolVarP(&follow, "follow", "f", false, "go on until the sandbox or build has ended")
	cmd.Flags().BoolVar(&console, "console", false, "the console of a sandbox")
	cmd.Flags().BoolVar(&build, "build", false, "the build of a snapshot or an image")
	return cmd
}

// harmless passes text on without what moves the cursor of a terminal or worse:
// a guest's console is whatever the guest likes.
type harmless struct {
	w    io.Writer
	rest []byte // the start of a character that is not complete
}

func (h *harmless) Write(p []byte) (int, error) {
	in := append(h.rest, p...)
	out := make([]byte, 0, len(in))
	for len(in) > 0 && (utf8.FullRune(in) || len(in) >= utf8.UTFMax) {
		r, n := utf8.DecodeRune(in)
		switch {
		case r == utf8.RuneError && n == 1:
			out = append(out, '?')
		case r == '\n' || r == '\t' || (r >= ' ' && r < 0x7f) || r >= 0xa0:
			out = append(out, in[:n]...)
		}
		in = in[n:]
	}
	h.rest = append([]byte(nil), in...)
	if _, err := h.w.Write(out); err != nil {
		return 0, err
	}
	return len(p), nil
}
