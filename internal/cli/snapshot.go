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

// snapshotFlags are the flags of snapshot create.
type snapshotFlags struct {
	tag, image, from, warm string
	exec                   []string
	execTimeout            time.Duration
	allowHosts             []string
	start                  startFlags
	copies                 []string
	shape                  shape
	labels                 []string
	replace, withSecrets   bool
}

func (a *app) snapshotCommand() *cobra.Command {
	cmd := a.snapshotCreateCommand("snapshot")
	cmd.Short = "Make and manage snapshots"
	cmd.AddCommand(
		a.snapshotCreateCommand("create"), a.snapshotLsCommand("ls"), a.snapshotInfoCommand("info SNAPSHOT"),
		a.snapshotRmCommand("rm SNAPSHOT..."), a.snapshotTagCommand(), a.snapshotUntagCommand(),
		a.snapshotCompactCommand("compact SNAPSHOT --to TAG"), a.snapshotRebuildCommand(),
	)
	return cmd
}

// aliasCommands are the spellings of upstream, docs/compat.md.
func (a *app) aliasCommands() []*cobra.Command {
	list := []*cobra.Command{
		a.snapshotLsCommand("images"), a.snapshotRmCommand("rmi SNAPSHOT..."), a.snapshotInfoCommand("snapshot-info SNAPSHOT"),
		a.snapshotCompactCommand("snapshot-compact"),
	}
	for _, cmd := range list {
		cmd.Hidden = true
		cmd.Aliases = nil
	}
	return list
}

func (a *app) snapshotCreateCommand(use string) *cobra.Command {
	var f snapshotFlags
	var old fromSandbox
	cmd := &cobra.Command{
		Use:   use,
		Short: "Make a snapshot of an image or another snapshot",
		Long:  "Boot an image (--image) or fork a snapshot (--from), run commands and warm-up code in it, and capture it.\nWithout either, it starts from " + builtin + ".",
		Example: "  forkd snapshot --tag my-base --image python --warm \"import numpy, json\"\n" +
			"  forkd snapshot --tag py-data --exec \"pip install pandas\"",
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if old.given() {
				return old.branch(cmd.Context(), a, f)
			}
			return a.snapshotCreate(cmd.Context(), f)
		},
	}
	old.register(cmd)
	fl := cmd.Flags()
	fl.StringVarP(&f.tag, "tag", "t", "", "name of the result (required)")
	fl.StringVar(&f.image, "image", "", "image to boot")
	fl.StringVar(&f.from, "from", "", "snapshot to start from")
	fl.StringVar(&f.warm, "warm", "", "code to run in the warm interpreter")
	fl.StringArrayVar(&f.exec, "exec", nil, "shell command to run before the capture (repeatable, in order)")
	fl.DurationVar(&f.execTimeout, "exec-timeout", 0, "limit of each command (default 30m)")
	fl.StringArrayVar(&f.allowHosts, "allow-host", nil, "HOST[:PORT] or *.SUFFIX that commands may connect to, besides this host's registries (repeatable)")
	fl.StringArrayVarP(&f.labels, "label", "l", nil, "label KEY=VALUE (repeatable)")
	fl.BoolVar(&f.replace, "replace", false, "move the tag if it is taken")
	fl.BoolVar(&f.withSecrets, "with-secrets", false, "start from a memory that holds secrets")
	fl.StringArrayVar(&f.copies, "copy", nil, "SRC:DST: copy a file or directory of this machine into the guest first (repeatable)")
	f.start.register(cmd)
	f.shape.register(cmd, "; fixed in the snapshot")
	return cmd
}

func (a *app) snapshotCreate(ctx context.Context, f snapshotFlags) error {
	if f.tag == "" {
		return errdefs.WithHint(errdefs.New(errdefs.ErrInvalid, "name the snapshot with --tag"), "see: forkd snapshot --help")
	}
	labels, err := assignments("label", f.labels, nil)
	if err != nil {
		return err
	}
	start, err := f.start.request(a.env.Getenv)
	if err != nil {
		return err
	}
	copies, err := copiesOf(f.copies)
	if err != nil {
		return err
	}
	c, err := a.client()
	if err != nil {
		return err
	}
	p := a.progress()
	p.step("making snapshot "+f.tag, -1)
	sn, err := c.CreateSnapshotWith(ctx, forkd.SnapshotRequest{
		Tag: f.tag, Replace: f.replace, WithSecrets: f.withSecrets, Image: f.image, From: f.from, Warm: f.warm, Exec: f.exec,
		ExecTimeout: f.execTimeout.Seconds(), AllowHosts: f.allowHosts, Labels: labels,
		Start: start, CPUs: f.shape.cpus, MemoryMiB: int(f.shape.memory), DiskMiB: int(f.shape.disk),
	}, copies, p.step)
	p.done()
	if err != nil {
		return err
	}
	l := a.snapshotListing([]forkd.Snapshot{sn})
	l.json = sn
	return a.list(l)
}

func (a *app) snapshotLsCommand(use string) *cobra.Command {
	return &cobra.Command{
		Use:     use,
		Aliases: []string{"list"},
		Short:   "List snapshots",
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			c, err := a.client()
			if err != nil {
				return err
			}
			list, err := c.Snapshots(cmd.Context())
			if err != nil {
				return err
			}
			return a.list(a.snapshotListing(list))
		},
	}
}

func (a *app) snapshotListing(list []forkd.Snapshot) listing {
	l := listing{json: list, header: []string{"ID", "TAGS", "STATUS", "ENGINE", "MEMORY", "DISK", "STORED", "SANDBOXES", "AGE"}}
	for _, sn := range list {
		l.ids = append(l.ids, sn.ID)
		l.rows = append(l.rows, []string{
			sn.ID, strings.Join(sn.Tags, ","), sn.Status, sn.Engine, fmt.Sprintf("%d MiB", sn.MemoryMiB), fmt.Sprintf("%d MiB", sn.DiskMiB),
			size(sn.MemoryBytes + sn.DiskBytes), strconv.Itoa(sn.Sandboxes), a.age(sn.CreatedAtUnix),
		})
	}
	return l
}

func (a *app) snapshotInfoCommand(use string) *cobra.Command {
	return &cobra.Command{
		Use:   use,
		Short: "Show a snapshot and its place in the tree",
		Args:  cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			c, err := a.client()
			if err != nil {
				return err
			}
			sn, err := c.Snapshot(cmd.Context(), args[0])
			if err != nil {
				return err
			}
			switch {
			case a.json:
				return a.printJSON(sn)
			case a.quiet:
				_, err := fmt.Fprintln(a.env.Stdout, sn.ID)
				return err
			}
			return a.table(nil, a.snapshotRows(sn))
		},
	}
}

func (a *app) snapshotRows(sn forkd.SnapshotDetail) [][]string {
	status := sn.Status
	if sn.Warning != "" {
		status += ": " + sn.Warning
	}
	return [][]string{
		{"id", sn.ID},
		{"tags", strings.Join(sn.Tags, ", ")},
		{"status", status},
		{"age", a.age(sn.CreatedAtUnix)},
		{"image", sn.Image},
		{"engine", sn.Engine + ", " + sn.Isolation},
		{"memory of forks", sn.ForkMemory},
		{"size", fmt.Sprintf("%d CPUs, %d MiB memory, %d MiB disk", sn.CPUs, sn.MemoryMiB, sn.DiskMiB)},
		{"stored", fmt.Sprintf("memory %s, disk %s, devices %s", size(sn.MemoryBytes), size(sn.DiskBytes), size(sn.VMStateBytes))},
		{"with ancestors", fmt.Sprintf("%s of %s", size(sn.ChainBytes), size(sn.MemoryLogicalBytes+sn.DiskLogicalBytes))},
		{"depth", strconv.Itoa(sn.ChainDepth)},
		{"warm", sn.Recipe.Warm},
		{"exec", strings.Join(sn.Recipe.Exec, "; ")},
		{"start", startText(sn.Recipe.Start)},
		{"ancestors", strings.Join(sn.Ancestors, ", ")},
		{"dependents", strings.Join(sn.Dependents, ", ")},
		{"branched from", sn.BranchedFrom},
		{"expires", a.expiry(sn.ExpiresUnix)},
		{"used by", strings.Join(sn.UsedBy, ", ")},
		{"directory", sn.Dir},
	}
}
