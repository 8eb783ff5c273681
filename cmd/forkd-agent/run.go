package main

import (
	"context"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"strconv"
	"strings"
	"syscall"

	"forkd.dev/forkd/internal/agent"
	"forkd.dev/forkd/internal/agent/guestboot"
)

// version is set by the linker.
var version = "dev"

// runMachine is PID 1 of a virtual machine. It never returns while the kernel
// still obeys: a machine without its agent is of no use.
func runMachine() {
	if err := serveMachine(); err != nil {
		guestboot.Say(err.Error())
	}
	if err := guestboot.PowerOff(); err != nil {
		guestboot.Say("power off: " + err.Error())
	}
	select {}
}

func serveMachine() error {
	m, err := guestboot.Boot()
	if err != nil {
		return err
	}
	for _, w := range m.Warnings {
		guestboot.Say(w)
	}
	if err := agent.GoRealtime(); err != nil {
		guestboot.Say("real-time priority: " + err.Error())
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer stop()
	ch, err := agent.NewChannel(m.Port, m.Port, agent.Endless)
	if err != nil {
		return err
	}
	a, err := agent.New(agent.Config{Channel: ch, System: true, CgroupDir: m.CgroupDir, Log: guestboot.Say, Version: version})
	if err != nil {
		return err
	}
	return a.Run(ctx)
}

// runStream serves inherited descriptors, for user-space kernels and tests.
func runStream(ctx context.Context, args []string) error {
	flags := flag.NewFlagSet("forkd-agent", flag.ContinueOnError)
	fds := flags.String("fd", "3", "descriptor of the agent channel, or two as IN,OUT")
	root := flags.String("root", "", "prefix of the identity files")
	noSystem := flags.Bool("no-system", false, "leave clock, hostname and kernel entropy alone")
	cgroup := flags.String("cgroup", "", "cgroup2 directory for user processes")
	if err := flags.Parse(args); err != nil {
		return err
	}
	in, out, err := descriptors(*fds)
	if err != nil {
		return err
	}
	ch, err := agent.NewChannel(in, out, agent.Ending)
	if err != nil {
		return err
	}
	a, err := agent.New(agent.Config{
		Channel: ch, Root: *root, System: !*noSystem, CgroupDir: *cgroup, Version: version,
		Log: func(line string) { fmt.Fprintln(os.Stderr, "forkd-agent:", line) },
	})
	if err != nil {
		return err
	}
	return a.Run(ctx)
}

// descriptors takes over "N" or "IN,OUT".
func descriptors(spec string) (in, out *os.File, err error) {
	first, second, two := strings.Cut(spec, ",")
	if !two {
		second = first
	}
	var fd [2]int
	for i, s := range []string{first, second} {
		if fd[i], err = strconv.Atoi(s); err != nil || fd[i] < 0 {
			return nil, nil, fmt.Errorf("descriptor %q is not a number", s)
		}
		if err := syscall.SetNonblock(fd[i], true); err != nil {
			return nil, nil, fmt.Errorf("use descriptor %d: %w", fd[i], err)
		}
		syscall.CloseOnExec(fd[i])
	}
	in = os.NewFile(uintptr(fd[0]), "channel")
	if !two {
		return in, in, nil
	}
	return in, os.NewFile(uintptr(fd[1]), "channel"), nil
}
