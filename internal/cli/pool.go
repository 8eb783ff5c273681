package cli

import (
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"forkd.dev/forkd/internal/errdefs"
	forkd "forkd.dev/forkd/sdk/go"
)

func (a *app) poolCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "pool",
		Short: "Keep warm machines ready, from which forks start at once",
		Long: "A warm machine has gone the whole way from restore to a first answer, and stands still.\n" +
			"A fork that claims one answers several times sooner. Warm machines take memory, and give way to forks when it is short.\n" +
			"A blank machine is restored but has never run: it saves a fork the restore only, and costs little.",
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	cmd.AddCommand(a.poolSetCommand(), a.poolLsCommand())
	return cmd
}

func (a *app) poolSetCommand() *cobra.Command {
	const absent = forkd.DefaultBlank - 1
	warm, blank := -1, absent
	cmd := &cobra.Command{
		Use:               "set SNAPSHOT --warm N",
		Short:             "Keep N warm (or blank) machines of a snapshot ready; 0 ends them",
		Example:           "  forkd pool set py-base --warm 20",
		Args:              cobra.ExactArgs(1),
		ValidArgsFunction: a.completeOne(a.snapshotNames),
		RunE: func(cmd *cobra.Command, args []string) error {
			if warm < 0 && blank == absent {
				return errdefs.WithHint(errdefs.New(errdefs.ErrInvalid, "say how many with --warm"), "forkd pool set %s --warm 20", args[0])
			}
			c, err := a.client()
			if err != nil {
				return err
			}
			var p forkd.Pool
			if blank != absent {
				p, err = c.SetBlankPool(cmd.Context(), args[0], blank)
			}
			if err == nil && warm >= 0 {
				p, err = c.SetPool(cmd.Context(), args[0], warm)
			}
			if err != nil {
				return err
			}
			l := poolListing([]forkd.Pool{p})
			l.json = p
			return a.list(l)
		},
	}
	cmd.Flags().IntVar(&warm, "warm", -1, "how many warm machines, 0 to 500")
	cmd.Flags().IntVar(&blank, "blank", absent, "how many blank machines, 0 to 500, until the daemon ends; -1 is its default")
	return cmd
}

func (a *app) poolLsCommand() *cobra.Command {
	return &cobra.Command{
		Use:     "ls",
		Aliases: []string{"list"},
		Short:   "List warm pools",
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			c, err := a.client()
			if err != nil {
				return err
			}
			list, err := c.Pools(cmd.Context())
			if err != nil {
				return err
			}
			return a.list(poolListing(list))
		},
	}
}

func poolListing(list []forkd.Pool) listing {
	l := listing{json: list, header: []string{"SNAPSHOT", "TAGS", "WARM", "READY", "BLANK", "READY", "NOTE"}}
	for _, p := range list {
		l.ids = append(l.ids, p.SnapshotID)
		l.rows = append(l.rows, []string{p.SnapshotID, strings.Join(p.Tags, ","), strconv.Itoa(p.Warm), strconv.Itoa(p.Ready), strconv.Itoa(p.Blank), strconv.Itoa(p.BlankReady), p.Reason})
	}
	return l
}
