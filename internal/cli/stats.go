package cli

import (
	"context"
	"fmt"
	"time"

	"github.com/spf13/cobra"

	"forkd.dev/forkd/internal/errdefs"
	forkd "forkd.dev/forkd/sdk/go"
)

func (a *app) statsCommand() *cobra.Command {
	var watch bool
	interval := 2 * time.Second
	cmd := &cobra.Command{
		Use:   "stats [SANDBOX...]",
		Short: "Show what sandboxes consume on the host",
		Long: "PSS counts a page shared by n processes as 1/n; PRIVATE belongs to the sandbox alone, SHARED also to others.\n" +
			"COPIED is the part of the guest's memory that differs from its snapshot's, DISK what it wrote to its disk.",
		ValidArgsFunction: a.completeMany(a.sandboxNames),
		RunE: func(cmd *cobra.Command, args []string) error {
			if interval < 100*time.Millisecond {
				return errdefs.New(errdefs.ErrInvalid, "--interval %v is shorter than 100ms", interval)
			}
			c, err := a.client()
			if err != nil {
				return err
			}
			if !watch {
				return a.showStats(cmd.Context(), c, args)
			}
			return a.watchStats(cmd.Context(), c, args, interval)
		},
	}
	cmd.Flags().BoolVarP(&watch, "watch", "w", false, "show it again and again until interrupted")
	cmd.Flags().DurationVar(&interval, "interval", interval, "time between two looks of --watch")
	return cmd
}

func (a *app) watchStats(ctx context.Context, c *forkd.Client, refs []string, interval time.Duration) error {
	tick := time.NewTicker(interval)
	defer tick.Stop()
	for {
		if !a.json && a.env.IsTerminal(a.env.Stdout) {
			fmt.Fprint(a.env.Stdout, "\x1b[H\x1b[2J") // home, clear
		}
		if err := a.showStats(ctx, c, refs); err != nil {
			return err
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return nil // watching has no other end
		}
	}
}

func (a *app) showStats(ctx context.Context, c *forkd.Client, refs []string) error {
	list := []forkd.Stat{}
	if len(refs) == 0 {
		var err error
		if list, err = c.Stats(ctx); err != nil {
			return err
		}
	}
	for _, ref := range refs {
		st, err := c.SandboxStats(ctx, ref)
		if err != nil {
			return err
		}
		list = append(list, st)
	}
	if a.json {
		return a.printJSON(list)
	}
	rows := make([][]string, 0, len(list)+1)
	var sum forkd.Usage
	for _, st := range list {
		u := st.Usage
		rows = append(rows, append([]string{st.ID, st.Name, st.SnapshotTag}, append(usageCells(u), a.since(u.LastActivityUnixMS))...))
		sum.PSSKiB += u.PSSKiB
		sum.PrivateKiB += u.PrivateKiB
		sum.GuestPagesKiB += u.GuestPagesKiB
		sum.DiskBytes += u.DiskBytes
		sum.CPUMS += u.CPUMS
	}
	if len(list) > 1 {
		cells := usageCells(sum)
		cells[2] = "" // what is shared is shared: it has no sum
		rows = append(rows, append([]string{fmt.Sprintf("all %d", len(list)), "", ""}, append(cells, "")...))
	}
	return a.table([]string{"ID", "NAME", "SNAPSHOT", "PSS", "PRIVATE", "SHARED", "COPIED", "DISK", "CPU", "ACTIVE"}, rows)
}

func usageCells(u forkd.Usage) []string {
	return []string{
		size(u.PSSKiB << 10), size(u.PrivateKiB << 10), size(u.SharedKiB << 10), size(u.GuestPagesKiB << 10), size(u.DiskBytes), millis(u.CPUMS),
	}
}

// since says how long ago a time in Unix milliseconds was.
func (a *app) since(unixMS int64) string {
	if unixMS == 0 {
		return ""
	}
	return a.age(unixMS / 1000)
}
