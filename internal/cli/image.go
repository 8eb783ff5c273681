package cli

import (
	"context"
	"fmt"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"forkd.dev/forkd/internal/errdefs"
	forkd "forkd.dev/forkd/sdk/go"
)

func (a *app) imageCommand() *cobra.Command {
	cmd := &cobra.Command{Use: "image", Short: "Build and manage images", Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() }}
	cmd.AddCommand(a.imageBuildCommand(), a.imageLsCommand(), a.imageRmCommand(), a.imageInspectCommand())
	return cmd
}

func (a *app) imageBuildCommand() *cobra.Command {
	var tag, archive, kernel string
	var packages []string
	var disk mib
	var replace bool
	cmd := &cobra.Command{
		Use:   "build --tag NAME [PACKAGE...]",
		Short: "Build an image of Debian with packages, or of an archive",
		Example: "  forkd image build --tag tools python3 git\n" +
			"  docker export c1 | forkd image build --tag mine --from-tar -",
		RunE: func(cmd *cobra.Command, args []string) error {
			if archive != "" && tag == "" && len(args) == 1 {
				tag, args = args[0], nil
			}
			if tag == "" {
				return errdefs.WithHint(errdefs.New(errdefs.ErrInvalid, "name the image with --tag"), "see: forkd image build --help")
			}
			return a.imageBuild(cmd.Context(), archive, forkd.ImageRequest{
				Name: tag, Replace: replace, Packages: append(packages, args...), DiskMiB: int(disk), Kernel: kernel,
			})
		},
	}
	fl := cmd.Flags()
	fl.StringVarP(&tag, "tag", "t", "", "name of the result (required)")
	fl.StringSliceVarP(&packages, "package", "p", nil, "Debian packages (repeatable, comma-separated)")
	fl.StringVar(&archive, "from-tar", "", "root file system as a tar archive, plain or compressed by gzip, zstd or xz; - reads standard input")
	fl.StringVar(&kernel, "kernel", "", "name of a kernel that was added (default Debian's)")
	fl.Var(&disk, "disk", "size of the disk in MiB, or as 8G (default 4096)")
	fl.BoolVar(&replace, "replace", false, "move the name if it is taken")
	return cmd
}

func (a *app) imageBuild(ctx context.Context, archive string, req forkd.ImageRequest) error {
	c, err := a.client()
	if err != nil {
		return err
	}
	build := func(progress forkd.Progress) (forkd.Image, error) { return c.BuildImage(ctx, req, progress) }
	if archive != "" {
		r, done, err := a.open(archive)
		if err != nil {
			return err
		}
		defer done()
		build = func(progress forkd.Progress) (forkd.Image, error) { return c.BuildImageOf(ctx, req, r, progress) }
	}
	p := a.progress()
	p.step("building image "+req.Name, -1)
	im, err := build(p.step)
	p.done()
	if err != nil {
		return err
	}
	l := a.imageListing([]forkd.Image{im})
	l.json = im
	return a.list(l)
}

func (a *app) imageLsCommand() *cobra.Command {
	return &cobra.Command{
		Use:     "ls",
		Aliases: []string{"list"},
		Short:   "List images",
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			c, err := a.client()
			if err != nil {
				return err
			}
			list, err := c.Images(cmd.Context())
			if err != nil {
				return err
			}
			return a.list(a.imageListing(list))
		},
	}
}

func (a *app) imageListing(list []forkd.Image) listing {
	l := listing{json: list, header: []string{"ID", "NAME", "SOURCE", "DISK", "STORED", "SNAPSHOTS", "AGE"}}
	for _, im := range list {
		l.ids = append(l.ids, im.ID)
		l.rows = append(l.rows, []string{
			im.ID, im.Name, im.Source, fmt.Sprintf("%d MiB", im.DiskMiB), size(im.Bytes), strconv.Itoa(len(im.UsedBy)), a.age(im.CreatedAtUnix),
		})
	}
	return l
}

func (a *app) imageRmCommand() *cobra.Command {
	return &cobra.Command{
		Use:     "rm IMAGE...",
		Aliases: []string{"delete"},
		Short:   "Remove images that no snapshot uses",
		Args:    cobra.MinimumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			c, err := a.client()
			if err != nil {
				return err
			}
			return a.removeEach(cmd.Context(), args, c.RemoveImage)
		},
	}
}

func (a *app) imageInspectCommand() *cobra.Command {
	return &cobra.Command{
		Use:     "inspect IMAGE",
		Aliases: []string{"info"},
		Short:   "Show an image",
		Args:    cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			c, err := a.client()
			if err != nil {
				return err
			}
			im, err := c.Image(cmd.Context(), args[0])
			if err != nil {
				return err
			}
			switch {
			case a.json:
				return a.printJSON(im)
			case a.quiet:
				_, err := fmt.Fprintln(a.env.Stdout, im.ID)
				return err
			}
			return a.table(nil, [][]string{
				{"id", im.ID},
				{"name", im.Name},
				{"age", a.age(im.CreatedAtUnix)},
				{"source", im.Source},
				{"packages", strings.Join(im.Packages, " ")},
				{"kernel", im.Kernel},
				{"disk", fmt.Sprintf("%d MiB", im.DiskMiB)},
				{"stored", size(im.Bytes)},
				{"digest", im.Digest},
				{"built-in", strconv.FormatBool(im.Builtin)},
				{"used by", strings.Join(im.UsedBy, ", ")},
			})
		},
	}
}
