package cli

import (
	"context"
	"errors"
	"fmt"

	"github.com/spf13/cobra"
	"golang.org/x/sync/errgroup"

	"forkd.dev/forkd/internal/errdefs"
	forkd "forkd.dev/forkd/sdk/go"
)

// parallel is how many requests a command has open at once.
const parallel = 16

func (a *app) lsCommand() *cobra.Command {
	var all bool
	cmd := &cobra.Command{
		Use:     "ls [SANDBOX...]",
		Aliases: []string{"list", "ps"},
		Short:   "List sandboxes; named ones with receipt and usage (--json)",
		RunE: func(cmd *cobra.Command, args []string) error {
			list, err := a.sandboxes(cmd.Context(), args)
			if err != nil {
				return err
			}
			if !all && len(args) == 0 {
				list = living(list)
			}
			return a.list(a.sandboxListing(list))
		},
	}
	cmd.Flags().BoolVarP(&all, "all", "a", false, "also those that ended in the last 24 h")
	return cmd
}

// sandboxes gets the named sandboxes, or all.
func (a *app) sandboxes(ctx context.Context, refs []string) ([]forkd.Sandbox, error) {
	c, err := a.client()
	if err != nil {
		return nil, err
	}
	if len(refs) == 0 {
		return c.Sandboxes(ctx)
	}
	list := make([]forkd.Sandbox, 0, len(refs))
	for _, ref := range refs {
		sb, err := c.Sandbox(ctx, ref)
		if err != nil {
			return nil, err
		}
		list = append(list, sb)
	}
	return list, nil
}

// living drops the sandboxes that have ended.
func living(list []forkd.Sandbox) []forkd.Sandbox {
	out := []forkd.Sandbox{}
	for _, sb := range list {
		if sb.EndedAtUnix == nil {
			out = append(out, sb)
		}
	}
	return out
}

func (a *app) sandboxListing(list []forkd.Sandbox) listing {
	l := listing{json: list, header: []string{"ID", "NAME", "SNAPSHOT", "STATE", "AGE", "MEMORY", "ISOLATION"}}
	for _, sb := range list {
		l.ids = append(l.ids, sb.ID)
		state := sb.State
		if sb.Reason != "" {
			state += ": " + sb.Reason
		}
		l.rows = append(l.rows, []string{sb.ID, sb.Name, sb.SnapshotTag, state, a.age(sb.CreatedAtUnix), fmt.Sprintf("%d MiB", sb.MemoryMiB), sb.Isolation})
	}
	return l
}

func (a *app) killCommand() *cobra.Command {
	var all bool
	var tag string
	cmd := &cobra.Command{
		Use:     "kill SANDBOX...",
		Aliases: []string{"rm"},
		Short:   "End sandboxes",
		RunE: func(cmd *cobra.Command, args []string) error {
			given := 0
			for _, is := range []bool{all, tag != "", len(args) > 0} {
				if is {
					given++
				}
			}
			if given != 1 {
				return errdefs.New(errdefs.ErrInvalid, "name sandboxes, or use --all, or --tag SNAPSHOT")
			}
			return a.kill(cmd.Context(), args, tag)
		},
	}
	cmd.Flags().BoolVar(&all, "all", false, "end all sandboxes")
	cmd.Flags().StringVarP(&tag, "tag", "t", "", "end all sandboxes of this snapshot")
	return cmd
}

// kill ends the sandboxes of refs or, if there are none, all (of snapshot tag).
func (a *app) kill(ctx context.Context, refs []string, tag string) error {
	c, err := a.client()
	if err != nil {
		return err
	}
	if len(refs) == 0 {
		list, err := c.Sandboxes(ctx)
		if err != nil {
			return err
		}
		for _, sb := range living(list) {
			if tag == "" || sb.SnapshotTag == tag || sb.SnapshotID == tag {
				refs = append(refs, sb.ID)
			}
		}
	}
	errs := killAll(ctx, c, refs)
	type outcome struct {
		ID     string `json:"id"`
		Killed bool   `json:"killed"`
		Error  string `json:"error,omitempty"`
	}
	outcomes := make([]outcome, 0, len(refs))
	var failed []error
	l := listing{}
	for i, ref := range refs {
		if errs[i] != nil {
			outcomes = append(outcomes, outcome{ID: ref, Error: errs[i].Error()})
			failed = append(failed, errs[i])
			continue
		}
		outcomes = append(outcomes, outcome{ID: ref, Killed: true})
		l.ids = append(l.ids, ref)
		l.rows = append(l.rows, []string{ref})
	}
	l.json = outcomes
	if err := a.list(l); err != nil {
		return err
	}
	return a.someFailed(failed, len(refs))
}

// someFailed reports the failures of n like operations.
func (a *app) someFailed(failed []error, n int) error {
	switch {
	case len(failed) == 0:
		return nil
	case n == 1:
		return failed[0]
	}
	for _, err := range failed {
		a.report(err)
	}
	if len(failed) == n {
		return exitWith(classCode(failed[0]))
	}
	return exitWith(exitPartial)
}

// killAll ends sandboxes, a few at a time, and returns the error of each.
func killAll(ctx context.Context, c *forkd.Client, refs []string) []error {
	errs := make([]error, len(refs))
	var g errgroup.Group
	g.SetLimit(parallel)
	for i, ref := range refs {
		g.Go(func() error {
			errs[i] = c.Kill(ctx, ref)
			return nil
		})
	}
	_ = g.Wait() // each error is in errs
	return errs
}

// removeAll ends sandboxes that a command made for itself. It works also after
// Ctrl-C, and one that is gone already is fine.
func removeAll(ctx context.Context, c *forkd.Client, refs []string) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), cleanUpTime)
	defer cancel()
	var failed []error
	for _, err := range killAll(ctx, c, refs) {
		if err != nil && !errors.Is(err, forkd.ErrNotFound) {
			failed = append(failed, err)
		}
	}
	return errors.Join(failed...)
}
