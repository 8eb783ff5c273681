package cli

import (
	"context"
	"errors"
	"fmt"

	"github.com/spf13/cobra"

	"forkd.dev/forkd/internal/errdefs"
	forkd "forkd.dev/forkd/sdk/go"
)

func (a *app) snapshotRmCommand(use string) *cobra.Command {
	var cascade, force bool
	cmd := &cobra.Command{
		Use:     use,
		Aliases: []string{"delete"},
		Short:   "Delete snapshots",
		Args:    cobra.MinimumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			mode := forkd.DeleteAlone
			switch {
			case cascade && force:
				return errdefs.New(errdefs.ErrInvalid, "--cascade and --force exclude each other")
			case cascade:
				mode = forkd.DeleteCascade
			case force:
				mode = forkd.DeleteForce
			}
			c, err := a.client()
			if err != nil {
				return err
			}
			return a.removeEach(cmd.Context(), args, func(ctx context.Context, ref string) error {
				err := c.DeleteSnapshot(ctx, ref, mode)
				if errors.Is(err, forkd.ErrNotFound) && forkd.Hint(err) == "" {
					err = errdefs.WithHint(err, "forkd snapshot ls lists snapshots; an image is removed by: forkd image rm %s", ref)
				}
				return err
			})
		},
	}
	cmd.Flags().BoolVar(&cascade, "cascade", false, "delete the snapshots that depend on it, too")
	cmd.Flags().BoolVar(&force, "force", false, "delete even if others depend on it")
	return cmd
}

// removeEach removes one after the other and prints what is gone.
func (a *app) removeEach(ctx context.Context, refs []string, remove func(context.Context, string) error) error {
	var failed []error
	removed := []string{}
	for _, ref := range refs {
		if err := remove(ctx, ref); err != nil {
			failed = append(failed, err)
			continue
		}
		removed = append(removed, ref)
	}
	l := listing{json: map[string][]string{"removed": removed}, ids: removed}
	for _, ref := range removed {
		l.rows = append(l.rows, []string{ref})
	}
	if err := a.list(l); err != nil {
		return err
	}
	return a.someFailed(failed, len(refs))
}

func (a *app) snapshotTagCommand() *cobra.Command {
	var replace, withSecrets bool
	cmd := &cobra.Command{
		Use:   "tag SNAPSHOT TAG",
		Short: "Give a snapshot a tag",
		Args:  cobra.ExactArgs(2),
		RunE: func(cmd *cobra.Command, args []string) error {
			c, err := a.client()
			if err != nil {
				return err
			}
			req := forkd.TagRequest{Snapshot: args[0], Replace: replace, WithSecrets: withSecrets}
			if err := c.GiveTag(cmd.Context(), args[1], req); err != nil {
				return err
			}
			return a.tagDone(args[1])
		},
	}
	cmd.Flags().BoolVar(&replace, "replace", false, "move the tag if it is taken")
	cmd.Flags().BoolVar(&withSecrets, "with-secrets", false, "name a memory that holds secrets")
	return cmd
}

func (a *app) snapshotUntagCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "untag TAG",
		Short: "Remove a tag; its snapshot stays",
		Args:  cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			c, err := a.client()
			if err != nil {
				return err
			}
			if err := c.Untag(cmd.Context(), args[0]); err != nil {
				return err
			}
			return a.tagDone(args[0])
		},
	}
}

func (a *app) tagDone(tag string) error {
	if a.json {
		return a.printJSON(map[string]string{"tag": tag})
	}
	_, err := fmt.Fprintln(a.env.Stdout, tag)
	return err
}
