package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"time"
)

// options are the command line.
type options struct {
	kernel    string // unpacked kernel package
	work      string
	only      *regexp.Regexp
	verbose   bool
	list      bool
	phase     string // "", "build" or "boot"
	memoryMiB int
	cpus      int
	timeout   time.Duration
}

func parse(args []string) (options, error) {
	var o options
	set := flag.NewFlagSet("nested", flag.ContinueOnError)
	set.StringVar(&o.kernel, "kernel", "", "directory of the unpacked kernel package of L1")
	set.StringVar(&o.work, "work", "", "keep disk and logs in this directory (default: a temporary one, removed if all passes)")
	only := set.String("only", "", "run the parts whose name matches this regular expression")
	set.BoolVar(&o.verbose, "v", false, "print the output of the tests to stderr as it comes")
	set.StringVar(&o.phase, "phase", "", "only build what L1 needs into -work, or only boot what is there: build, boot")
	set.BoolVar(&o.list, "list", false, "list the parts and end")
	set.IntVar(&o.memoryMiB, "memory", 5120, "memory of L1 in MiB")
	set.IntVar(&o.cpus, "cpus", 2, "processors of L1")
	set.DurationVar(&o.timeout, "timeout", 20*time.Minute, "end L1 after this time")
	if err := set.Parse(args); err != nil {
		return o, err
	}
	var err error
	if o.only, err = regexp.Compile(*only); err != nil {
		return o, fmt.Errorf("-only: %w", err)
	}
	switch {
	case o.kernel == "" && !o.list:
		return o, errors.New("-kernel is missing")
	case o.phase != "" && o.phase != "build" && o.phase != "boot", o.phase != "" && o.work == "":
		return o, errors.New("-phase is build or boot and needs -work")
	}
	return o, nil
}

func run(ctx context.Context, args []string) (err error) {
	o, err := parse(args)
	if errors.Is(err, flag.ErrHelp) {
		return nil
	}
	if err != nil {
		return err
	}
	parts := chosen(o.only)
	if o.list {
		for _, p := range parts {
			fmt.Fprintln(os.Stdout, p.name)
		}
		return nil
	}
	if len(parts) == 0 {
		return fmt.Errorf("no part matches %s", o.only)
	}
	if o.work == "" {
		if o.work, err = os.MkdirTemp("/var/tmp", "forkd-nested-"); err != nil {
			return err
		}
		defer func() {
			if err == nil {
				err = os.RemoveAll(o.work)
			} else {
				err = fmt.Errorf("%w (the console of L1 is in %s)", err, o.work)
			}
		}()
	} else if err = os.MkdirAll(o.work, 0o755); err != nil {
		return err
	}
	l1 := newMachine(o)
	began := time.Now()
	if o.phase != "boot" {
		if err := l1.build(ctx, parts); err != nil {
			return err
		}
		fmt.Fprintf(os.Stderr, "nested: built disk and initramfs in %.1f s\n", time.Since(began).Seconds())
	}
	if o.phase == "build" {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, o.timeout)
	defer cancel()
	r := &reporter{out: os.Stdout, echo: io.Discard, parts: parts}
	if o.verbose {
		r.echo = os.Stderr
	}
	began = time.Now()
	if err := l1.run(ctx, r); err != nil {
		return errors.Join(err, tail(filepath.Join(o.work, consoleFile), os.Stderr))
	}
	fmt.Fprintf(os.Stderr, "nested: L1 ran for %.1f s\n", time.Since(began).Seconds())
	return r.verdict()
}

// tail copies the end of the file to w.
func tail(path string, w io.Writer) error {
	const most = 4096
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	if st, err := f.Stat(); err == nil && st.Size() > most {
		if _, err := f.Seek(-most, io.SeekEnd); err != nil {
			return err
		}
	}
	_, err = io.Copy(w, f)
	return err
}
