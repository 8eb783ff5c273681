package cli

import (
	"context"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"forkd.dev/forkd/api/rest"
	"forkd.dev/forkd/internal/errdefs"
	forkd "forkd.dev/forkd/sdk/go"
)

// checkpointFlags are the flags of checkpoint.
type checkpointFlags struct {
	label        string
	sync, freeze bool
	auto         string
}

func (a *app) checkpointCommand() *cobra.Command {
	var f checkpointFlags
	cmd := &cobra.Command{
		Use:   "checkpoint SANDBOX",
		Short: "Note the state of a running sandbox, to return to it with rollback",
		Long: "Capture memory, processor and disk of a running sandbox at one instant, so that rollback can return it there, in place.\n" +
			"It returns when the sandbox runs again; the checkpoint is written in the background (--sync waits for it).\n" +
			"A checkpoint can be forked like any snapshot, and goes with its sandbox.\n" +
			"With --auto a checkpoint is made each interval in which the sandbox did something, and the newest stay.",
		Example: "  forkd checkpoint worker --label before-the-risky-step\n  forkd rollback worker before-the-risky-step\n" +
			"  forkd checkpoint worker --auto every=30s,keep=20",
		Args:              cobra.ExactArgs(1),
		ValidArgsFunction: a.completeOne(a.sandboxNames),
		RunE: func(cmd *cobra.Command, args []string) error {
			if f.auto != "" {
				if f.label != "" || f.sync || !f.freeze {
					return errdefs.New(errdefs.ErrInvalid, "--auto sets a schedule: --label, --sync and --freeze do not go with it")
				}
				return a.autoCheckpoint(cmd.Context(), args[0], f.auto)
			}
			return a.checkpoint(cmd.Context(), args[0], f)
		},
	}
	fl := cmd.Flags()
	fl.StringVarP(&f.label, "label", "l", "", "what to call it")
	fl.BoolVar(&f.sync, "sync", false, "wait until it is written")
	fl.BoolVar(&f.freeze, "freeze", true, "let user processes stand still around the capture")
	fl.StringVar(&f.auto, "auto", "", "make them by themselves: every=DURATION[,keep=N], or off")
	return cmd
}

func (a *app) checkpoint(ctx context.Context, ref string, f checkpointFlags) error {
	req := forkd.CheckpointRequest{Label: f.label, Sync: f.sync}
	if !f.freeze {
		req.Freeze = forkd.Bool(false)
	}
	c, err := a.client()
	if err != nil {
		return err
	}
	p := a.progress()
	p.step("capturing "+ref, -1)
	b, err := c.Checkpoint(ctx, ref, req)
	p.done()
	if err != nil {
		return err
	}
	pause := 0.0
	if b.PauseMS != nil {
		pause = *b.PauseMS
	}
	return a.list(listing{
		json: b, ids: []string{b.ID},
		header: []string{"ID", "LABEL", "STATUS", "PAUSE", "STALL", "COPIED", "STORED"},
		rows:   [][]string{{b.ID, b.Labels[rest.LabelText], b.Status, millis(pause), millis(b.StallMS), size(b.CopiedBytes), stored(b.LayerBytes)}},
	})
}

// autoCheckpoint sets or ends a schedule.
func (a *app) autoCheckpoint(ctx context.Context, ref, text string) error {
	req, err := parseAuto(text)
	if err != nil {
		return err
	}
	c, err := a.client()
	if err != nil {
		return err
	}
	sb, err := c.SetAutoCheckpoint(ctx, ref, req)
	if err != nil {
		return err
	}
	schedule := "off"
	if sb.Auto != nil {
		schedule = fmt.Sprintf("every %s, the newest %d stay", sb.Auto.Every, sb.Auto.Keep)
	}
	return a.list(listing{
		json: sb, ids: []string{sb.ID},
		header: []string{"ID", "AUTOMATIC CHECKPOINTS"}, rows: [][]string{{sb.ID, schedule}},
	})
}

// parseAuto reads "off" or "every=30s,keep=20"; a space separates as well.
func parseAuto(text string) (forkd.AutoCheckpoint, error) {
	var out forkd.AutoCheckpoint
	if text == "off" {
		return forkd.AutoCheckpoint{Every: "off"}, nil
	}
	for _, item := range strings.FieldsFunc(text, func(r rune) bool { return r == ',' || r == ' ' }) {
		key, value, _ := strings.Cut(item, "=")
		var err error
		switch key {
		case "every":
			_, err = time.ParseDuration(value)
			out.Every = value
		case "keep":
			out.Keep, err = strconv.Atoi(value)
		default:
			err = errdefs.ErrInvalid
		}
		if err != nil {
			return out, badAuto(text)
		}
	}
	if out.Every == "" {
		return out, badAuto(text)
	}
	return out, nil
}

func badAuto(text string) error {
	return errdefs.WithHint(errdefs.New(errdefs.ErrInvalid, "--auto %.80q is no schedule", text), "write --auto every=30s,keep=20, or --auto off")
}

func (a *app) checkpointsCommand() *cobra.Command {
	return &cobra.Command{
		Use:               "checkpoints SANDBOX",
		Short:             "List the checkpoints of a sandbox, oldest first",
		Args:              cobra.ExactArgs(1),
		ValidArgsFunction: a.completeOne(a.sandboxNames),
		RunE: func(cmd *cobra.Command, args []string) error {
			c, err := a.client()
			if err != nil {
				return err
			}
			list, err := c.Checkpoints(cmd.Context(), args[0])
			if err != nil {
				return err
			}
			return a.list(a.checkpointListing(list))
		},
	}
}

func (a *app) checkpointListing(list []forkd.Snapshot) listing {
	l := listing{json: list, header: []string{"ID", "LABEL", "STATUS", "STORED", "AGE"}}
	for _, sn := range list {
		label, status := sn.Labels[rest.LabelText], sn.Status
		if label == "" && sn.Labels[rest.LabelAuto] != "" {
			label = "(automatic)"
		}
		if sn.Warning != "" {
			status += ": " + sn.Warning
		}
		l.ids = append(l.ids, sn.ID)
		l.rows = append(l.rows, []string{sn.ID, label, status, size(sn.MemoryBytes + sn.DiskBytes), a.age(sn.CreatedAtUnix)})
	}
	return l
}

func (a *app) rollbackCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "rollback SANDBOX [CHECKPOINT]",
		Short: "Return a sandbox to a checkpoint, in place",
		Long: "Put memory, processor and disk of a sandbox back to what they were at a checkpoint, by id or label; the latest if none is\n" +
			"named. Id, name, token and host name stay; new random numbers of the kernel differ, seeded generators repeat theirs.\n" +
			"Calls under way end. If it fails, the sandbox goes on as it is. A sandbox that is lost comes back to life.",
		Example:           "  forkd rollback worker\n  forkd rollback worker before-the-risky-step",
		Args:              cobra.RangeArgs(1, 2),
		ValidArgsFunction: a.completeRollback,
		RunE: func(cmd *cobra.Command, args []string) error {
			to := ""
			if len(args) == 2 {
				to = args[1]
			}
			return a.rollback(cmd.Context(), args[0], to)
		},
	}
}

func (a *app) rollback(ctx context.Context, ref, to string) error {
	c, err := a.client()
	if err != nil {
		return err
	}
	p := a.progress()
	p.step("rolling "+ref+" back", -1)
	res, err := c.Rollback(ctx, ref, to)
	p.done()
	if err != nil {
		return err
	}
	return a.list(listing{
		json: res, ids: []string{res.Sandbox.ID},
		header: []string{"ID", "NAME", "STATE", "CHECKPOINT", "TOOK"},
		rows:   [][]string{{res.Sandbox.ID, res.Sandbox.Name, res.Sandbox.State, res.CheckpointID, millis(res.DurationMS)}},
	})
}

// completeRollback completes a sandbox and one of its checkpoints.
func (a *app) completeRollback(cmd *cobra.Command, args []string, typed string) ([]string, cobra.ShellCompDirective) {
	switch len(args) {
	case 0:
		return a.complete(cmd, nil, typed, []names{a.sandboxNames})
	case 1:
		return a.complete(cmd, nil, typed, []names{func(ctx context.Context, c *forkd.Client) ([]string, error) {
			list, err := c.Checkpoints(ctx, args[0])
			var out []string
			for _, sn := range list {
				out = append(out, sn.ID+"\t"+oneLine("checkpoint "+sn.Labels[rest.LabelText]))
			}
			return out, err
		}})
	}
	return nil, cobra.ShellCompDirectiveNoFileComp
}
