package cli

import (
	"context"
	"fmt"
	"strings"

	"github.com/spf13/cobra"

	"forkd.dev/forkd/internal/errdefs"
	forkd "forkd.dev/forkd/sdk/go"
)

// branchFlags are the flags of branch.
type branchFlags struct {
	tag, mode              string
	noWait, freeze, syncFS bool
	replace, withSecrets   bool
	labels                 []string
}

func (a *app) branchCommand() *cobra.Command {
	var f branchFlags
	cmd := &cobra.Command{
		Use:   "branch SANDBOX",
		Short: "Capture a running sandbox into a snapshot; it goes on",
		Long: "Capture memory, processor and disk of a running sandbox at one instant into a snapshot, from which any number of\n" +
			"sandboxes continue. The sandbox stands still only while its changed memory is copied.\n" +
			"Without --tag a name is made up, and the snapshot goes after 24 h unless it gets a tag.",
		Example:           "  forkd branch worker --tag before-the-risky-step\n  forkd fork before-the-risky-step -n 5",
		Args:              cobra.ExactArgs(1),
		ValidArgsFunction: a.completeOne(a.sandboxNames),
		RunE:              func(cmd *cobra.Command, args []string) error { return a.branch(cmd.Context(), args[0], f) },
	}
	fl := cmd.Flags()
	fl.StringVarP(&f.tag, "tag", "t", "", "name of the snapshot")
	fl.StringVar(&f.mode, "mode", "", "live or diff: what differs from the parent; full: a snapshot without parent (default: the best the engine has)")
	fl.BoolVar(&f.noWait, "no-wait", false, "return as soon as the sandbox runs again; the snapshot is written in the background")
	fl.BoolVar(&f.freeze, "freeze", true, "let user processes stand still until a fork has its identity")
	fl.BoolVar(&f.syncFS, "sync", false, "write file systems out before")
	fl.BoolVar(&f.replace, "replace", false, "move the tag if it is taken")
	fl.StringArrayVarP(&f.labels, "label", "l", nil, "label KEY=VALUE (repeatable)")
	fl.BoolVar(&f.withSecrets, "with-secrets", false, "give a tag to a memory that holds secrets")
	return cmd
}

func (a *app) branch(ctx context.Context, ref string, f branchFlags) error {
	labels, err := assignments("label", f.labels, nil)
	if err != nil {
		return err
	}
	req := forkd.BranchRequest{Tag: f.tag, Mode: f.mode, Sync: f.syncFS, Labels: labels, Replace: f.replace, WithSecrets: f.withSecrets}
	if f.noWait {
		req.Wait = forkd.Bool(false)
	}
	if !f.freeze {
		req.Freeze = forkd.Bool(false)
	}
	c, err := a.client()
	if err != nil {
		return err
	}
	p := a.progress()
	p.step("capturing "+ref, -1)
	b, err := c.Branch(ctx, ref, req)
	p.done()
	if err != nil {
		return err
	}
	return a.list(branchListing(b))
}

func branchListing(b forkd.BranchResult) listing {
	pause := 0.0
	if b.PauseMS != nil {
		pause = *b.PauseMS
	}
	return listing{
		json: b, ids: []string{b.ID},
		header: []string{"ID", "TAGS", "STATUS", "FROM", "PAUSE", "STALL", "COPIED", "STORED"},
		rows: [][]string{{
			b.ID, strings.Join(b.Tags, ","), b.Status, b.BranchedFrom, millis(pause), millis(b.StallMS), size(b.CopiedBytes), stored(b.LayerBytes),
		}},
	}
}

// stored is the size of what a capture stores, which is not known before it is written.
func stored(bytes int64) string {
	if bytes == 0 {
		return "-"
	}
	return size(bytes)
}

// fromSandbox is upstream's spelling of branch: snapshot --from-sandbox.
type fromSandbox struct {
	id                 string
	diff, live, noWait bool
}

func (f *fromSandbox) register(cmd *cobra.Command) {
	fl := cmd.Flags()
	fl.StringVar(&f.id, "from-sandbox", "", "capture a running sandbox, as forkd branch does")
	fl.BoolVar(&f.diff, "diff", false, "with --from-sandbox: as --mode diff")
	fl.BoolVar(&f.live, "live", false, "with --from-sandbox: as --mode live")
	fl.BoolVar(&f.noWait, "no-wait", false, "with --from-sandbox --live: do not wait until it is written")
	for _, name := range []string{"from-sandbox", "diff", "live", "no-wait"} {
		_ = fl.MarkHidden(name) // it exists
	}
}

// branch runs the branch that the old flags ask for.
func (f *fromSandbox) branch(ctx context.Context, a *app, sf snapshotFlags) error {
	b := branchFlags{tag: sf.tag, noWait: f.noWait, freeze: true, replace: sf.replace, labels: sf.labels}
	switch {
	case f.id == "":
		return errdefs.New(errdefs.ErrInvalid, "--diff, --live and --no-wait are for --from-sandbox")
	case sf.image != "" || sf.from != "" || sf.warm != "" || len(sf.exec) > 0:
		return errdefs.New(errdefs.ErrInvalid, "--from-sandbox captures a sandbox as it is: --image, --from, --warm and --exec do not go with it")
	case f.diff && f.live:
		return errdefs.New(errdefs.ErrInvalid, "--diff and --live exclude each other")
	case f.noWait && !f.live:
		return errdefs.New(errdefs.ErrInvalid, "--no-wait needs --live")
	case f.diff:
		b.mode = "diff"
	case f.live:
		b.mode = "live"
	}
	if err := a.branch(ctx, f.id, b); err != nil {
		return fmt.Errorf("snapshot of sandbox %s: %w", f.id, err)
	}
	return nil
}

func (f *fromSandbox) given() bool { return f.id != "" || f.diff || f.live || f.noWait }
