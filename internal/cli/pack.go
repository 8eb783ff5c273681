package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"

	"github.com/spf13/cobra"

	"forkd.dev/forkd/internal/errdefs"
	forkd "forkd.dev/forkd/sdk/go"
)

// packSuffix is what names of packs end with.
const packSuffix = ".forkd"

func (a *app) packCommand() *cobra.Command {
	var output, tag string
	var secrets bool
	cmd := &cobra.Command{
		Use:   "pack SNAPSHOT",
		Short: "Write a snapshot with all it needs to one file",
		Long: "Write a snapshot with its ancestors, its image and its kernel to one file, from which forkd unpack makes it elsewhere.\n" +
			"It can be restored where the same engine runs, on a host with the same time stamp counter rate; elsewhere it is listed as stale.",
		Example:           "  forkd pack my-base -o my-base.forkd\n  forkd pack my-base -o - | ssh other forkd unpack -",
		Args:              cobra.MaximumNArgs(1),
		ValidArgsFunction: a.completeOne(a.snapshotNames),
		RunE: func(cmd *cobra.Command, args []string) error {
			ref, err := oneRef(args, "tag", tag)
			if err != nil {
				return err
			}
			if output == "" {
				output = ref + packSuffix
			}
			return a.pack(cmd.Context(), ref, output, forkd.Secrets(secrets))
		},
	}
	fl := cmd.Flags()
	fl.StringVarP(&output, "output", "o", "", "the file, or - for standard output (default SNAPSHOT"+packSuffix+")")
	fl.BoolVar(&secrets, "with-secrets", false, "also if its memory may hold secrets that a sandbox was given")
	fl.StringVarP(&tag, "tag", "t", "", "the snapshot, instead of the argument")
	_ = fl.MarkHidden("tag") // it exists
	return cmd
}

func (a *app) pack(ctx context.Context, ref, output string, secrets forkd.Secrets) error {
	if output == "-" && a.env.IsTerminal(a.env.Stdout) {
		return errdefs.WithHint(errdefs.New(errdefs.ErrInvalid, "a pack is not for a terminal"), "name a file with -o, or redirect the output")
	}
	c, err := a.client()
	if err != nil {
		return err
	}
	p := a.progress()
	p.step("reading "+ref, -1)
	defer p.done()
	count := func(n int64) { p.step(fmt.Sprintf("packing %s: %s", ref, size(n)), -1) }
	if output == "-" {
		return c.Pack(ctx, ref, secrets, &counted{w: a.env.Stdout, tell: count})
	}
	n, err := writeWhole(output, func(w io.Writer) error { return c.Pack(ctx, ref, secrets, &counted{w: w, tell: count}) })
	if err != nil {
		return err
	}
	p.done()
	return a.list(listing{
		json: map[string]any{"file": output, "bytes": n}, ids: []string{output},
		header: []string{"FILE", "SIZE"}, rows: [][]string{{output, size(n)}},
	})
}

// writeWhole makes a file that is there only once it is complete. It may hold the
// memory of a machine, so only its owner can read it.
func writeWhole(path string, write func(io.Writer) error) (n int64, err error) {
	f, err := os.CreateTemp(filepath.Dir(path), ".forkd-pack-*")
	if err != nil {
		return 0, errdefs.As(errdefs.ErrInvalid, fmt.Errorf("create file: %w", err))
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, f.Close(), os.Remove(f.Name()))
		}
	}()
	if err := write(f); err != nil {
		return 0, err
	}
	st, err := f.Stat()
	if err != nil {
		return 0, fmt.Errorf("write %s: %w", path, err)
	}
	if err := f.Sync(); err != nil {
		return 0, fmt.Errorf("write %s: %w", path, err)
	}
	if err := os.Rename(f.Name(), path); err != nil {
		return 0, fmt.Errorf("write %s: %w", path, err)
	}
	return st.Size(), f.Close()
}

// counted tells how many bytes went through, once for each MiB.
type counted struct {
	w    io.Writer
	n    int64
	tell func(int64)
}

func (c *counted) Write(p []byte) (int, error) {
	n, err := c.w.Write(p)
	before := c.n >> 20
	c.n += int64(n)
	if c.n>>20 != before {
		c.tell(c.n)
	}
	return n, err
}

func (a *app) unpackCommand() *cobra.Command {
	var req forkd.UnpackRequest
	cmd := &cobra.Command{
		Use:   "unpack FILE",
		Short: "Make a snapshot from a pack",
		Long: "Make the snapshot of a pack available here, with its ancestors, its image and its kernel. What is here already is left alone.\n" +
			"Everything is verified before anything of it is visible.",
		Example: "  forkd unpack my-base.forkd --tag theirs",
		Args:    cobra.ExactArgs(1),
		RunE:    func(cmd *cobra.Command, args []string) error { return a.unpack(cmd.Context(), args[0], req) },
	}
	cmd.Flags().StringVarP(&req.Tag, "tag", "t", "", "tag of the snapshot (default the one it had)")
	cmd.Flags().BoolVar(&req.Force, "force", false, "move the tag if it is taken")
	return cmd
}

func (a *app) unpack(ctx context.Context, file string, req forkd.UnpackRequest) error {
	from, total := a.env.Stdin, int64(-1)
	if file != "-" {
		f, err := os.Open(file)
		if err != nil {
			return errdefs.As(errdefs.ErrNotFound, fmt.Errorf("open pack: %w", err))
		}
		defer f.Close()
		if st, err := f.Stat(); err == nil {
			total = st.Size()
		}
		from = f
	}
	if from == nil {
		return errdefs.New(errdefs.ErrInvalid, "there is nothing on standard input")
	}
	c, err := a.client()
	if err != nil {
		return err
	}
	p := a.progress()
	p.step("unpacking "+file, 0)
	through := &counted{w: io.Discard, tell: func(n int64) {
		if n >= total {
			p.step("checking", -1)
			return
		}
		p.step("unpacking "+file, float64(n)/float64(total))
	}}
	sn, err := c.Unpack(ctx, io.TeeReader(from, through), req)
	p.done()
	if err != nil {
		return err
	}
	l := a.snapshotListing([]forkd.Snapshot{sn})
	l.json = sn
	return a.list(l)
}
