package cli

import (
	"context"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	forkd "forkd.dev/forkd/sdk/go"
)

// completeTime bounds the question to the daemon behind a press of the tab key.
const completeTime = 800 * time.Millisecond

// names asks the daemon for what can stand for an argument. "name\tdescription" is
// what shells show.
type names func(ctx context.Context, c *forkd.Client) ([]string, error)

// completion is cobra's function for the values of an argument or flag.
type completion func(cmd *cobra.Command, args []string, typed string) ([]string, cobra.ShellCompDirective)

// completeOne completes the first argument.
func (a *app) completeOne(sources ...names) completion {
	return func(cmd *cobra.Command, args []string, typed string) ([]string, cobra.ShellCompDirective) {
		if len(args) > 0 {
			return nil, cobra.ShellCompDirectiveNoFileComp
		}
		return a.complete(cmd, nil, typed, sources)
	}
}

// completeMany completes any number of arguments, each name once.
func (a *app) completeMany(sources ...names) completion {
	return func(cmd *cobra.Command, args []string, typed string) ([]string, cobra.ShellCompDirective) {
		return a.complete(cmd, args, typed, sources)
	}
}

// complete is silent: a daemon that is not there completes nothing.
func (a *app) complete(cmd *cobra.Command, used []string, typed string, sources []names) ([]string, cobra.ShellCompDirective) {
	parent := cmd.Context()
	if parent == nil {
		parent = context.Background()
	}
	ctx, cancel := context.WithTimeout(parent, completeTime)
	defer cancel()
	if err := a.loadConfig(cmd); err != nil {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	c, err := a.client()
	if err != nil {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	defer c.Close()
	var out []string
	for _, source := range sources {
		list, err := source(ctx, c)
		if err != nil {
			continue
		}
		for _, item := range list {
			name, _, _ := strings.Cut(item, "\t")
			if strings.HasPrefix(name, typed) && !slices.Contains(used, name) {
				out = append(out, item)
			}
		}
	}
	return out, cobra.ShellCompDirectiveNoFileComp
}

func (a *app) sandboxNames(ctx context.Context, c *forkd.Client) ([]string, error) {
	list, err := c.Sandboxes(ctx)
	var out []string
	for _, sb := range living(list) {
		note := "\t" + oneLine("sandbox of "+sb.SnapshotTag)
		if sb.Name != "" {
			out = append(out, sb.Name+note)
		}
		out = append(out, sb.ID+note)
	}
	return out, err
}

func (a *app) snapshotNames(ctx context.Context, c *forkd.Client) ([]string, error) {
	list, err := c.Snapshots(ctx)
	var out []string
	for _, sn := range list {
		for _, tag := range sn.Tags {
			out = append(out, tag+"\tsnapshot "+sn.ID)
		}
		out = append(out, sn.ID+"\t"+oneLine("snapshot "+strings.Join(sn.Tags, ", ")))
	}
	return out, err
}

func (a *app) tagNames(ctx context.Context, c *forkd.Client) ([]string, error) {
	list, err := c.Snapshots(ctx)
	var out []string
	for _, sn := range list {
		for _, tag := range sn.Tags {
			out = append(out, tag+"\tsnapshot "+sn.ID)
		}
	}
	return out, err
}

func (a *app) imageNames(ctx context.Context, c *forkd.Client) ([]string, error) {
	list, err := c.Images(ctx)
	var out []string
	for _, im := range list {
		out = append(out, im.Name+"\t"+oneLine("image of "+im.Source))
	}
	return out, err
}

// completeArguments attaches completion to commands made elsewhere, by their path,
// and to the flags that name objects.
func (a *app) completeArguments(root *cobra.Command) {
	for _, row := range []struct {
		path string
		args completion
	}{
		{"fork", a.completeOne(a.snapshotNames, a.sandboxNames)},
		{"ls", a.completeMany(a.sandboxNames)},
		{"kill", a.completeMany(a.sandboxNames)},
		{"exec", a.completeOne(a.sandboxNames)},
		{"eval", a.completeOne(a.sandboxNames)},
		{"ping", a.completeMany(a.sandboxNames)},
		{"snapshot info", a.completeOne(a.snapshotNames)},
		{"snapshot rm", a.completeMany(a.snapshotNames)},
		{"snapshot tag", a.completeOne(a.snapshotNames)},
		{"snapshot untag", a.completeOne(a.tagNames)},
		{"image inspect", a.completeOne(a.imageNames)},
		{"image rm", a.completeMany(a.imageNames)},
	} {
		cmd, rest, err := root.Find(strings.Fields(row.path))
		if err == nil && len(rest) == 0 && cmd.ValidArgsFunction == nil {
			cmd.ValidArgsFunction = row.args
		}
	}
	for _, row := range []struct {
		path, flag string
		names      names
	}{
		{"fork", "tag", a.snapshotNames},
		{"kill", "tag", a.snapshotNames},
		{"run", "tag", a.snapshotNames},
		{"snapshot", "from", a.snapshotNames},
		{"snapshot create", "from", a.snapshotNames},
		{"snapshot", "image", a.imageNames},
		{"snapshot create", "image", a.imageNames},
	} {
		cmd, rest, err := root.Find(strings.Fields(row.path))
		if err != nil || len(rest) > 0 || cmd.Flags().Lookup(row.flag) == nil {
			continue
		}
		// It fails only for a flag that has one already, which then is the better one.
		_ = cmd.RegisterFlagCompletionFunc(row.flag, func(cmd *cobra.Command, _ []string, typed string) ([]string, cobra.ShellCompDirective) {
			return a.complete(cmd, nil, typed, []names{row.names})
		})
	}
}
