package sandbox

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"time"

	"forkd.dev/forkd/internal/errdefs"
	"forkd.dev/forkd/internal/ident"
	"forkd.dev/forkd/internal/store/metadata"
)

// keepEnded is how long the reason of a sandbox's end stays readable.
const keepEnded = 24 * time.Hour

// recover makes the journal, the processes and the directories agree, after any
// end of the daemon before: sandboxes that run are adopted, what was being made
// or ended is removed, and processes and directories nobody knows disappear.
func (s *Service) recover(ctx context.Context) error {
	if _, err := s.cfg.Journal.PruneEnded(ctx, time.Now().Add(-keepEnded)); err != nil {
		return err
	}
	rows, err := s.cfg.Journal.ListSandboxes(ctx, metadata.SandboxFilter{})
	if err != nil {
		return err
	}
	for _, row := range rows {
		if err := s.recoverRow(ctx, row); err != nil {
			return err
		}
	}
	if err := s.reapUnknown(ctx); err != nil {
		return err
	}
	if err := s.recoverSnapshots(ctx); err != nil {
		return err
	}
	s.collectAll()
	return s.recoverLogs(ctx)
}

// recoverLogs removes the logs of builds that did not end and of what is gone.
func (s *Service) recoverLogs(ctx context.Context) error {
	known := map[string]bool{}
	rows, err := s.cfg.Journal.ListSnapshots(ctx)
	if err != nil {
		return err
	}
	for _, row := range rows {
		known[row.ID] = true
	}
	images, err := s.cfg.Images.List()
	if err != nil {
		return err
	}
	for _, img := range images {
		known[img.ID] = true
	}
	return s.logs.sweep(known)
}

// recoverRow deals with one sandbox of the journal.
func (s *Service) recoverRow(ctx context.Context, row metadata.Sandbox) error {
	info := fromRow(row)
	switch {
	case !info.State.living():
		s.register(&entry{info: info})
		return nil
	case row.Session != "" || info.State == Creating || info.State == Stopping:
		s.cfg.Log("removing sandbox %s, left %s", info.ID, info.State)
		if err := s.discard(info.machine()); err != nil {
			return err
		}
		return s.cfg.Journal.DeleteSandboxes(ctx, info.ID)
	}
	machine, err := s.cfg.Engine.Adopt(ctx, info.machine(), s.machineDir(info.machine()))
	if ctx.Err() != nil {
		return ctx.Err() // nobody knows whether it is gone: it is not touched
	}
	if err != nil {
		s.cfg.Log("sandbox %s is gone: %v", info.ID, err)
		reason := "its machine ended while the daemon was down"
		if !errors.Is(err, errdefs.ErrNotFound) {
			reason = "the daemon could not take it over: " + err.Error()
		}
		s.lose(&info, reason)
		s.register(&entry{info: info})
		return errors.Join(s.discard(info.machine()), s.journal(ctx, info))
	}
	info.State, info.PID = Running, machine.PID()
	e := &entry{machine: machine, link: newLink(machine, s.cfg.Connect, helloTimeout), info: info}
	e.release = s.leaseFor(info.base(), info.ID)
	s.register(e)
	s.cfg.Log("adopted sandbox %s (process %d)", info.ID, info.PID)
	s.group.Go(func() { s.goOn(e) })
	return nil
}

// goOn lets a sandbox run again that a capture has left stopped or frozen, as one does
// that was under way when the daemon ended. It tries until that is done, the machine
// has ended or the service closes.
func (s *Service) goOn(e *entry) {
	again := time.NewTicker(time.Second)
	defer again.Stop()
	for n := 0; ; n++ {
		err := s.letGo(e)
		if err == nil || s.ctx.Err() != nil || !e.alive() {
			return
		}
		if n == 0 {
			s.cfg.Log("let sandbox %s go on: %v", e.snapshot().ID, err)
		}
		select {
		case <-again.C:
		case <-e.machine.Done():
			return
		case <-s.ctx.Done():
			return
		}
	}
}

func (s *Service) letGo(e *entry) error {
	ctx, cancel := context.WithTimeout(s.ctx, helloTimeout)
	defer cancel()
	err := e.machine.Resume(ctx)
	if err == nil && e.snapshot().owed == verdictSource {
		err = e.link.call(ctx, func(a Agent) error { return a.VerdictSource(ctx) })
		if errors.Is(err, errdefs.ErrConflict) {
			err = nil // it was not frozen yet, or not any more
		}
		if err == nil {
			err = s.journal(ctx, e.update(func(sb *Sandbox) { sb.owed = "" }))
		}
	}
	return err
}

// reapUnknown ends processes and removes directories that belong to no living
// sandbox: prepared machines of the pool, and forks that were cut short.
func (s *Service) reapUnknown(ctx context.Context) error {
	orphans, err := s.cfg.Engine.Orphans(ctx)
	if err != nil {
		return err
	}
	// Orphans come from the names of processes, which any user of the host can choose.
	orphans = slices.DeleteFunc(orphans, func(id string) bool { return ident.KindOf(id) != ident.Sandbox })
	dirs, err := os.ReadDir(s.cfg.Dir)
	if err != nil {
		return fmt.Errorf("list sandbox directories: %w", err)
	}
	for _, d := range dirs {
		if ident.KindOf(d.Name()) == ident.Sandbox {
			orphans = append(orphans, d.Name())
		}
	}
	used := map[string]bool{}
	for _, e := range s.known() {
		if info := e.snapshot(); info.State.living() {
			used[info.machine()] = true
		}
	}
	slices.Sort(orphans)
	for _, id := range slices.Compact(orphans) {
		if used[id] {
			continue
		}
		s.cfg.Log("removing what is left of %s", id)
		if err := s.discard(id); err != nil {
			return err
		}
	}
	return nil
}
