package cli

import (
	"fmt"
	"io"
	"os"
	"strconv"

	"github.com/spf13/cobra"

	"forkd.dev/forkd/internal/errdefs"
	forkd "forkd.dev/forkd/sdk/go"
)

func (a *app) kernelCommand() *cobra.Command {
	cmd := &cobra.Command{Use: "kernel", Short: "Manage guest kernels", Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() }}
	cmd.AddCommand(a.kernelLsCommand(), a.kernelAddCommand(), a.kernelRmCommand())
	return cmd
}

func (a *app) kernelLsCommand() *cobra.Command {
	return &cobra.Command{
		Use:     "ls",
		Aliases: []string{"list"},
		Short:   "List guest kernels",
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			c, err := a.client()
			if err != nil {
				return err
			}
			list, err := c.Kernels(cmd.Context())
			if err != nil {
				return err
			}
			return a.list(a.kernelListing(list))
		},
	}
}

func (a *app) kernelListing(list []forkd.Kernel) listing {
	l := listing{json: list, header: []string{"NAME", "RELEASE", "DIGEST", "MODULES", "STORED", "IMAGES", "AGE"}}
	for _, k := range list {
		name := k.Name
		if k.Default {
			name = "(default)"
		}
		l.ids = append(l.ids, k.Digest)
		l.rows = append(l.rows, []string{
			name, k.Release, fmt.Sprintf("%.12s", k.Digest), strconv.Itoa(k.Modules), size(k.Bytes), strconv.Itoa(len(k.UsedBy)), a.age(k.CreatedAtUnix),
		})
	}
	return l
}

func (a *app) kernelAddCommand() *cobra.Command {
	var modules string
	cmd := &cobra.Command{
		Use:     "add NAME FILE",
		Short:   "Add a kernel: an ELF vmlinux or a bzImage",
		Example: "  forkd kernel add mine arch/x86/boot/bzImage --modules /lib/modules/6.9.1-mine",
		Args:    cobra.ExactArgs(2),
		RunE: func(cmd *cobra.Command, args []string) error {
			c, err := a.client()
			if err != nil {
				return err
			}
			p := a.progress()
			p.step("adding kernel "+args[0], -1)
			k, err := c.AddKernel(cmd.Context(), args[0], args[1], modules)
			p.done()
			if err != nil {
				return err
			}
			l := a.kernelListing([]forkd.Kernel{k})
			l.json = k
			return a.list(l)
		},
	}
	cmd.Flags().StringVar(&modules, "modules", "", "directory lib/modules/RELEASE of it, unless the drivers of a guest are built in")
	return cmd
}

func (a *app) kernelRmCommand() *cobra.Command {
	return &cobra.Command{
		Use:     "rm NAME...",
		Aliases: []string{"delete"},
		Short:   "Remove kernels that no image uses",
		Args:    cobra.MinimumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			c, err := a.client()
			if err != nil {
				return err
			}
			return a.removeEach(cmd.Context(), args, c.RemoveKernel)
		},
	}
}

// open opens a file of this machine, or standard input for "-".
func (a *app) open(name string) (io.Reader, func(), error) {
	if name == "-" {
		if a.env.Stdin == nil {
			return nil, nil, errdefs.New(errdefs.ErrInvalid, "there is no standard input")
		}
		return a.env.Stdin, func() {}, nil
	}
	f, err := os.Open(name)
	if err != nil {
		return nil, nil, errdefs.New(errdefs.ErrInvalid, "open archive: %w", err)
	}
	return f, func() { _ = f.Close() }, nil
}
