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

// snapshotCompactCommand takes its source as argument or, as upstream, by --from.
func (a *app) snapshotCompactCommand(use string) *cobra.Command {
	var from, to string
	var replace, withSecrets bool
	cmd := &cobra.Command{
		Use:               use,
		Short:             "Make a snapshot that equals another and needs no ancestor",
		Example:           "  forkd snapshot compact deep --to flat",
		Args:              cobra.MaximumNArgs(1),
		ValidArgsFunction: a.completeOne(a.snapshotNames),
		RunE: func(cmd *cobra.Command, args []string) error {
			ref, err := oneRef(args, "from", from)
			if err != nil {
				return err
			}
			if to == "" {
				return errdefs.WithHint(errdefs.New(errdefs.ErrInvalid, "name the result with --to"), "forkd snapshot compact %s --to TAG", ref)
			}
			return a.makeSnapshot(cmd.Context(), "compacting "+ref, func(ctx context.Context, c *forkd.Client, p forkd.Progress) (forkd.Snapshot, error) {
				return c.CompactSnapshot(ctx, ref, forkd.CompactRequest{To: to, Replace: replace, WithSecrets: withSecrets}, p)
			})
		},
	}
	cmd.Flags().StringVar(&from, "from", "", "the snapshot, instead of the argument")
	cmd.Flags().StringVar(&to, "to", "", "tag of the result (required)")
	cmd.Flags().BoolVar(&withSecrets, "with-secrets", false, "name a memory that holds secrets")
	cmd.Flags().BoolVar(&replace, "replace", false, "move the tag if it is taken")
	return cmd
}

func (a *app) snapshotRebuildCommand() *cobra.Command {
	return &cobra.Command{
		Use:               "rebuild SNAPSHOT",
		Short:             "Make a snapshot again from its recipe, under the same tags",
		Args:              cobra.ExactArgs(1),
		ValidArgsFunction: a.completeOne(a.snapshotNames),
		RunE: func(cmd *cobra.Command, args []string) error {
			return a.makeSnapshot(cmd.Context(), "rebuilding "+args[0], func(ctx context.Context, c *forkd.Client, p forkd.Progress) (forkd.Snapshot, error) {
				return c.RebuildSnapshot(ctx, args[0], p)
			})
		},
	}
}

// makeSnapshot runs a call that ends in a snapshot, with progress, and prints that.
func (a *app) makeSnapshot(ctx context.Context, what string, make func(context.Context, *forkd.Client, forkd.Progress) (forkd.Snapshot, error)) error {
	c, err := a.client()
	if err != nil {
		return err
	}
	p := a.progress()
	p.step(what, -1)
	sn, err := make(ctx, c, p.step)
	p.done()
	if err != nil {
		return err
	}
	l := a.snapshotListing([]forkd.Snapshot{sn})
	l.json = sn
	return a.list(l)
}

func (a *app) verifyCommand() *cobra.Command {
	var repair bool
	cmd := &cobra.Command{
		Use:   "verify [SNAPSHOT]",
		Short: "Read what is stored again and compare it with its digests",
		Long: "Read a snapshot with its ancestors and its image, or everything, and compare it with what was stored.\n" +
			"With --repair, what is damaged is marked as failed, and all that was made from it, so that nothing is forked from it.",
		Args:              cobra.MaximumNArgs(1),
		ValidArgsFunction: a.completeOne(a.snapshotNames),
		RunE: func(cmd *cobra.Command, args []string) error {
			req := forkd.VerifyRequest{Repair: repair}
			if len(args) == 1 {
				req.Snapshot = args[0]
			}
			return a.verify(cmd.Context(), req)
		},
	}
	cmd.Flags().BoolVar(&repair, "repair", false, "mark what is damaged as failed, and tell how to make it again")
	return cmd
}

func (a *app) verify(ctx context.Context, req forkd.VerifyRequest) error {
	c, err := a.client()
	if err != nil {
		return err
	}
	p := a.progress()
	p.step("reading", -1)
	res, err := c.Verify(ctx, req, p.step)
	p.done()
	if err != nil {
		return err
	}
	l := listing{json: res, header: []string{"KIND", "ID", "NAME", "SIZE", "STATE", "REBUILD"}}
	for _, v := range res.Checked {
		state := "ok"
		switch {
		case !v.OK:
			state = v.Error
			l.ids = append(l.ids, v.ID) // scripts want the bad ones
		case v.Marked:
			state = "needs what is damaged"
		}
		l.rows = append(l.rows, []string{v.Kind, v.ID, v.Name, size(v.Bytes), state, v.Rebuild})
	}
	if err := a.list(l); err != nil || res.Damaged == 0 {
		return err
	}
	err = errdefs.New(errdefs.ErrCorrupt, "%d of %d are damaged", res.Damaged, len(res.Checked))
	if !req.Repair {
		return errdefs.WithHint(err, "forkd verify --repair keeps them from being forked; forkd snapshot rebuild makes one again")
	}
	return err
}

func (a *app) dfCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "df",
		Short: "Show what snapshots, images and sandboxes take on disk and in memory",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			c, err := a.client()
			if err != nil {
				return err
			}
			u, err := c.DiskUsage(cmd.Context())
			if err != nil {
				return err
			}
			return a.printUsage(u)
		},
	}
}

func (a *app) printUsage(u forkd.DiskUsage) error {
	l := listing{json: u, header: []string{"ID", "NAME", "OWN", "SHARED", "LOGICAL", "RESIDENT", "USED BY"}}
	for _, s := range u.Snapshots {
		l.ids = append(l.ids, s.ID)
		users := fmt.Sprintf("%d sandboxes, %d snapshots", s.Sandboxes, s.Dependents)
		if s.Prepared > 0 {
			users += fmt.Sprintf(", %d prepared", s.Prepared)
		}
		l.rows = append(l.rows, []string{s.ID, strings.Join(s.Tags, ","), size(s.OwnBytes), size(s.SharedBytes), size(s.LogicalBytes), size(s.ResidentBytes), users})
	}
	for _, im := range u.Images {
		l.ids = append(l.ids, im.ID)
		l.rows = append(l.rows, []string{im.ID, im.Name, size(im.Bytes), "", "", "", strconv.Itoa(len(im.UsedBy)) + " snapshots"})
	}
	if err := a.list(l); err != nil || a.json || a.quiet || !a.env.IsTerminal(a.env.Stdout) {
		return err
	}
	if _, err := fmt.Fprintln(a.env.Stdout); err != nil {
		return err
	}
	return a.table(nil, [][]string{
		{"snapshots", size(u.SnapshotBytes)},
		{"images", size(u.ImageBytes)},
		{"sandboxes", size(u.SandboxBytes)},
		{"free on disk", fmt.Sprintf("%s of %s, %s kept free", size(u.FreeBytes), size(u.TotalBytes), size(u.MinFreeBytes))},
		{"memory", fmt.Sprintf("%s, of it resident images %s", size(u.OccupiedBytes), size(u.ResidentBytes))},
	})
}

func (a *app) pruneCommand() *cobra.Command {
	var older string
	var labels []string
	keep := -1
	var dry bool
	cmd := &cobra.Command{
		Use:   "prune",
		Short: "Delete the snapshots that fulfil all that is said",
		Long: "Delete the snapshots that fulfil all that is said. What is in use, built in, or needed by a snapshot that stays, stays.\n" +
			"A tag does not protect a snapshot: look first with --dry-run.",
		Example: "  forkd prune --older 7d --dry-run\n  forkd prune --label team=x --keep 3",
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			req := forkd.PruneRequest{DryRun: dry}
			if older != "" {
				d, err := days(older)
				if err != nil {
					return err
				}
				req.OlderSecs = d.Seconds()
			}
			if cmd.Flags().Changed("keep") {
				req.Keep = &keep
			}
			var err error
			if req.Labels, err = pruneLabels(labels); err != nil {
				return err
			}
			return a.prune(cmd.Context(), req)
		},
	}
	fl := cmd.Flags()
	fl.StringVar(&older, "older", "", "made longer ago than this: 12h, 7d")
	fl.StringArrayVarP(&labels, "label", "l", nil, "with this label: KEY or KEY=VALUE (repeatable)")
	fl.IntVar(&keep, "keep", -1, "leave the N youngest of those")
	fl.BoolVarP(&dry, "dry-run", "n", false, "only tell what would go")
	return cmd
}

// days reads a time span that may count in days.
func days(text string) (time.Duration, error) {
	const most = 100 * 365
	if number, ok := strings.CutSuffix(text, "d"); ok {
		n, err := strconv.Atoi(number)
		if err == nil && n > 0 && n <= most {
			return time.Duration(n) * 24 * time.Hour, nil
		}
	} else if d, err := time.ParseDuration(text); err == nil && d > 0 {
		return d, nil
	}
	return 0, errdefs.New(errdefs.ErrInvalid, "--older %.40q is not a time span: write 90m, 12h or 7d", text)
}

func pruneLabels(list []string) (map[string]string, error) {
	out := make(map[string]string, len(list))
	for _, item := range list {
		key, value, _ := strings.Cut(item, "=")
		if key == "" {
			return nil, errdefs.New(errdefs.ErrInvalid, "--label %.80q is not KEY or KEY=VALUE", item)
		}
		out[key] = value
	}
	return out, nil
}

func (a *app) prune(ctx context.Context, req forkd.PruneRequest) error {
	c, err := a.client()
	if err != nil {
		return err
	}
	res, err := c.Prune(ctx, req)
	if err != nil {
		return err
	}
	l := listing{json: res, header: []string{"ID", "TAGS", "SIZE", "OUTCOME"}}
	for _, p := range res.Snapshots {
		outcome := "deleted"
		switch {
		case p.Kept != "":
			outcome = "stays: " + p.Kept
		case res.DryRun:
			outcome = "would be deleted"
		}
		if p.Kept == "" {
			l.ids = append(l.ids, p.ID)
		}
		l.rows = append(l.rows, []string{p.ID, strings.Join(p.Tags, ","), size(p.Bytes), outcome})
	}
	return a.list(l)
}

// expiry says in how long a snapshot goes.
func (a *app) expiry(unix *int64) string {
	if unix == nil {
		return ""
	}
	left := time.Unix(*unix, 0).Sub(a.env.Now())
	if left <= 0 {
		return "as soon as nothing uses it"
	}
	return "in " + left.Round(time.Minute).String() + ", unless it is tagged"
}
