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
	userKernel := flags.Bool("user-kernel", false, "be init on a user-space kernel, with pipes that have no end")
	if err := flags.Parse(args); err != nil {
		return err
	}
	in, out, err := descriptors(*fds)
	if err != nil {
		return err
	}
	ends, log := agent.Ending, func(line string) { fmt.Fprintln(os.Stderr, "forkd-agent:", line) }
	if *userKernel {
		ends, log = agent.Endless, guestboot.SayWithoutWaiting
		for _, w := range guestboot.SettleUserKernel() {
			log(w)
		}
		log("version " + version + " is init of a user-space kernel")
	}
	ch, err := agent.NewChannel(in, out, ends)
	if err != nil {
		return err
	}
	a, err := agent.New(agent.Config{
		Channel: ch, Root: *root, System: !*noSystem, UserKernel: *userKernel, CgroupDir: *cgroup, Version: version, Log: log,
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
	var files [2]*os.File
	for i, s := range []string{first, second} {
		n, err := strconv.Atoi(s)
		if err != nil || n < 0 {
			return nil, nil, fmt.Errorf("descriptor %q is not a number", s)
		}
		if i == 1 && !two {
			return files[0], files[0], nil
		}
		if files[i], err = agent.Inherit(n); err != nil {
			return nil, nil, err
		}
	}
	return files[0], files[1], nil
}
