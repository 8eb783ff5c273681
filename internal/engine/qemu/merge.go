package qemu

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	"forkd.dev/forkd/internal/engine"
	"forkd.dev/forkd/internal/errdefs"
	"forkd.dev/forkd/internal/ident"
	"forkd.dev/forkd/internal/linux"
)

// Overlays are merged by a QEMU of their own that runs no guest: it has opened a new
// overlay on top of them and streams into that what they hold. It parses what machines
// wrote, so it is confined as they are. Its inputs are open for reading only.

// mergePrefix begins the names of the directories of mergers, in the driver's own.
const mergePrefix = "merge-"

// backgroundBytesPerSecond is how fast a merge that nobody waits for reads.
const backgroundBytesPerSecond = 64 << 20

// merge is one merge under way.
type merge struct {
	d    *Driver
	id   string // of the process, in the form of a machine's: Reap finds it after a crash
	dir  string
	cmd  *exec.Cmd
	done chan struct{} // closed when the process has ended
	job  chan string   // receives how the job ended: "" is well
}

// mergeWanted is what a merge makes of what.
type mergeWanted struct {
	files []*os.File // qcow2, lowest first; what none of them holds stays unallocated
	out   string     // new file
	bytes int64      // per second; 0 is no bound
}

// mergeDisks writes a file that stands for all of w.files. On an error there is none.
// One merge runs at a time.
func (d *Driver) mergeDisks(ctx context.Context, w mergeWanted) (err error) {
	if err := d.merging.take(ctx); err != nil {
		return fmt.Errorf("merge disk layers: %w", err)
	}
	defer d.merging.give()
	size, err := qcow2Size(w.files[len(w.files)-1])
	if err != nil {
		return fmt.Errorf("merge disk layers: %w", err)
	}
	k := &merge{d: d, id: ident.New(ident.Sandbox), done: make(chan struct{}), job: make(chan string, 1)}
	k.dir = filepath.Join(d.cfg.Dir, mergePrefix+k.id)
	if err := os.Mkdir(k.dir, 0o711); err != nil {
		return fmt.Errorf("merge disk layers: %w", err)
	}
	defer os.RemoveAll(k.dir)
	err = k.run(ctx, w, int(size>>20))
	if err == nil {
		err = k.check(w.out, size)
	}
	if err != nil {
		if line := lastLine(filepath.Join(k.dir, logFile)); line != "" {
			err = fmt.Errorf("%w (QEMU says: %s)", err, line)
		}
		_ = os.Remove(w.out)
		return fmt.Errorf("merge disk layers: %w", err)
	}
	return nil
}

func (k *merge) check(path string, size int64) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	return checkQcow2(f, size)
}

// run starts the process, has it do the job, and waits for its end.
func (k *merge) run(ctx context.Context, w mergeWanted, diskMiB int) (err error) {
	d := k.d
	p := &process{
		name: d.processName(k.id), shape: engine.Shape{DiskMiB: diskMiB, MemoryMiB: 64}, merges: true,
		confine: confinement{root: d.isRoot, uid: d.pickUID(), dir: d.emptyDir},
	}
	for _, f := range w.files {
		p.disks = append(p.disks, diskFile{file: f, format: "qcow2"})
	}
	if p.overlay, err = newOverlay(w.out, diskMiB); err != nil {
		return err
	}
	defer p.overlay.close()
	if p.qmp, err = linux.ListenUnix(filepath.Join(k.dir, qmpSocket)); err != nil {
		return err
	}
	defer p.qmp.Close()
	if k.cmd, err = d.start(p, filepath.Join(k.dir, logFile)); err != nil {
		return err
	}
	go func() {
		defer close(k.done)
		_ = k.cmd.Wait()
	}()
	defer func() {
		_ = k.cmd.Process.Kill()
		<-k.done
		clean, cancel := afterwards(ctx)
		defer cancel()
		err = errors.Join(err, d.limits.Free(clean, k.id))
	}()
	if err := d.limit(engine.Spec{ID: k.id, Shape: p.shape}, k.cmd.Process.Pid); err != nil {
		return err
	}
	return k.stream(ctx, w.bytes)
}

// stream runs the job to its end.
func (k *merge) stream(ctx context.Context, bytes int64) error {
	q, err := dialQMP(ctx, filepath.Join(k.dir, qmpSocket), k.event)
	if err != nil {
		return err
	}
	defer q.Close()
	args := map[string]any{"job-id": "merge", "device": overlayNode(0), "speed": bytes}
	if err := q.run(ctx, "block-stream", args, nil); err != nil {
		return err
	}
	select {
	case failed := <-k.job:
		if failed != "" {
			return errdefs.New(errdefs.ErrCorrupt, "%s", failed[:min(len(failed), maxReason)])
		}
	case <-k.done:
		return errdefs.New(errdefs.ErrInternal, "the process ended")
	case <-ctx.Done():
		return ctx.Err()
	}
	// Metadata is written back when the file is closed, so it is asked to go.
	if err := q.run(ctx, "quit", nil, nil); err != nil && !errors.Is(err, errdefs.ErrUnavailable) {
		return err
	}
	select {
	case <-k.done:
	case <-ctx.Done():
		return ctx.Err()
	}
	if code := k.cmd.ProcessState.ExitCode(); code != 0 {
		return errdefs.New(errdefs.ErrInternal, "the process ended with exit code %d", code)
	}
	return nil
}

func (k *merge) event(e qmpEvent) {
	failed := ""
	switch e.Name {
	case "BLOCK_JOB_COMPLETED":
		failed, _ = e.Data["error"].(string)
	case "BLOCK_JOB_CANCELLED":
		failed = "the job was cancelled"
	default:
		return
	}
	select {
	case k.job <- failed:
	default:
	}
}

// mergeArgs is the command line of a merger.
func (p *process) mergeArgs() ([]string, *fdTable) {
	fds := &fdTable{}
	a := []string{
		"-nodefaults", "-no-user-config", "-display", "none", "-name", p.name, "-machine", "none", "-accel", "tcg,tb-size=1",
		"-chardev", fmt.Sprintf("socket,id=qmp,fd=%d,server=on,wait=off", fds.add(p.qmp)),
		"-mon", "chardev=qmp,mode=control",
	}
	a = append(a, p.diskArgs(fds)...)
	return append(a, p.confine.args()...), fds
}

// qcow2Size reads the size of the disk that a layer is of.
func qcow2Size(f *os.File) (int64, error) {
	head := make([]byte, 32)
	if _, err := f.ReadAt(head, 0); err != nil {
		return 0, fmt.Errorf("read header: %w", err)
	}
	size := binary.BigEndian.Uint64(head[24:])
	if binary.BigEndian.Uint32(head) != qcowMagic || size == 0 || size > 1<<50 || size%(1<<20) != 0 {
		return 0, errdefs.New(errdefs.ErrCorrupt, "a disk layer is no qcow2 file of whole MiB")
	}
	return int64(size), nil
}

// removeMerges deletes what mergers of an earlier daemon left.
func removeMerges(dir string) error {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return err
	}
	for _, e := range entries {
		if strings.HasPrefix(e.Name(), mergePrefix) {
			err = errors.Join(err, os.RemoveAll(filepath.Join(dir, e.Name())))
		}
	}
	return err
}
