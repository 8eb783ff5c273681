package agent

import (
	"bufio"
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"io"
	"os"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"forkd.dev/forkd/internal/agentwire"
	"forkd.dev/forkd/internal/agentwire/link"
	"forkd.dev/forkd/internal/errdefs"
)

// maxCommand bounds what is told of a process's arguments.
const maxCommand = 2 << 10

// serveInspect answers questions about files and processes until the host ends.
func (a *Agent) serveInspect(st *link.Stream) {
	st.Accept()
	defer st.Close()
	ctx, cancel := context.WithCancel(a.ctx)
	defer cancel()
	go func() {
		select {
		case <-st.Done():
			cancel()
		case <-ctx.Done():
		}
	}()
	in := inspector{agent: a, ctx: ctx, out: bufio.NewWriterSize(st, 64<<10)}
	var buf []byte
	for {
		_, body, grown, err := agentwire.ReadPart(st, buf)
		if err != nil {
			break
		}
		buf = grown
		if in.answer(body) != nil || in.out.Flush() != nil {
			break
		}
	}
	st.CloseWrite()
	drain(st)
}

// inspector answers on one inspect stream.
type inspector struct {
	agent *Agent
	ctx   context.Context
	out   *bufio.Writer
	files int
	buf   []byte
}

// answer returns an error only if the stream is of no more use.
func (in *inspector) answer(body []byte) error {
	var m agentwire.InspectRequest
	err := m.Decode(body)
	if err == nil {
		err = in.do(m)
	}
	if err == nil {
		return agentwire.WritePart(in.out, agentwire.PartEnd, nil)
	}
	told := agentwire.NewCallError(err)
	text := told.Append(nil)
	if len(text) >= agentwire.MaxInspectPart {
		return err
	}
	return agentwire.WritePart(in.out, agentwire.PartError, text)
}

func (in *inspector) do(m agentwire.InspectRequest) error {
	switch m.Op {
	case agentwire.InspectWalk:
		return in.walk(in.agent.path(m.Path))
	case agentwire.InspectDigest:
		h := sha256.New()
		if err := in.read(m, h); err != nil {
			return err
		}
		return agentwire.WritePart(in.out, agentwire.PartData, h.Sum(nil))
	case agentwire.InspectContent:
		return in.read(m, dataWriter{in.out})
	case agentwire.InspectProcesses:
		return in.processes()
	}
	return errdefs.New(errdefs.ErrUnsupported, "unknown operation %d", m.Op)
}

// walk tells of every file below a directory that is on its file system. It keeps a
// list of what is still to be looked at, so depth costs no stack.
func (in *inspector) walk(top string) error {
	var root unix.Stat_t
	if err := unix.Lstat(top, &root); err != nil {
		return fileError(top, err)
	}
	in.files = 0
	prefix := strings.TrimSuffix(in.agent.path("/"), "/")
	todo := []string{strings.TrimSuffix(top, "/")}
	for len(todo) > 0 {
		if err := in.ctx.Err(); err != nil {
			return err
		}
		dir := todo[len(todo)-1]
		todo = todo[:len(todo)-1]
		names, err := readNames(dir + "/")
		if err != nil {
			continue // removed meanwhile, or its path is too long: its entry was told
		}
		for _, name := range names {
			path := dir + "/" + name
			var st unix.Stat_t
			if unix.Lstat(path, &st) != nil || st.Dev != root.Dev {
				continue
			}
			if err := in.file(path, strings.TrimPrefix(path, prefix), &st); err != nil {
				return err
			}
			if st.Mode&unix.S_IFMT == unix.S_IFDIR {
				todo = append(todo, path)
			}
		}
	}
	return nil
}

func readNames(dir string) ([]string, error) {
	f, err := os.OpenFile(dir, os.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW, 0)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	return f.Readdirnames(-1)
}

func (in *inspector) file(path, told string, st *unix.Stat_t) error {
	if len(told) > agentwire.MaxInspectPath {
		return nil
	}
	if in.files++; in.files > agentwire.MaxInspectFiles {
		return errdefs.New(errdefs.ErrResourceExhausted, "the guest has more than %d files", agentwire.MaxInspectFiles)
	}
	m := agentwire.FileEntry{
		Path: told, Mode: st.Mode, Size: st.Size, MTime: st.Mtim.Nano(), CTime: st.Ctim.Nano(), Inode: st.Ino, UID: st.Uid, GID: st.Gid,
	}
	if st.Mode&unix.S_IFMT == unix.S_IFLNK {
		target, err := os.Readlink(path)
		if err == nil {
			m.Target = target[:min(len(target), agentwire.MaxInspectPath)]
		}
	}
	in.buf = m.Append(in.buf[:0])
	return agentwire.WritePart(in.out, agentwire.PartFile, in.buf)
}

// read copies a regular file to w.
func (in *inspector) read(m agentwire.InspectRequest, w io.Writer) error {
	path := in.agent.path(m.Path)
	fd, err := unix.Open(path, unix.O_RDONLY|unix.O_CLOEXEC|unix.O_NONBLOCK|unix.O_NOFOLLOW, 0)
	if err != nil {
		return fileError(m.Path, err)
	}
	f := os.NewFile(uintptr(fd), path)
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return fileError(m.Path, err)
	}
	switch {
	case !info.Mode().IsRegular():
		return errdefs.New(errdefs.ErrInvalid, "%.200q is no regular file", m.Path)
	case info.Size() > m.Limit:
		return errdefs.New(errdefs.ErrResourceExhausted, "%.200q has %d bytes, more than %d", m.Path, info.Size(), m.Limit)
	}
	// It may grow while it is read.
	_, err = io.Copy(w, untilDone{io.LimitReader(f, m.Limit), in.ctx})
	return fileError(m.Path, err)
}

func fileError(path string, err error) error {
	switch {
	case err == nil:
		return nil
	case errors.Is(err, unix.ENOENT), errors.Is(err, unix.ENOTDIR), errors.Is(err, unix.ELOOP):
		return errdefs.New(errdefs.ErrNotFound, "read %.200q: %w", path, err)
	}
	return errdefs.New(errdefs.Class(err), "read %.200q: %w", path, err)
}

// untilDone ends reading when a context ends.
type untilDone struct {
	io.Reader
	ctx context.Context
}

func (r untilDone) Read(p []byte) (int, error) {
	if err := r.ctx.Err(); err != nil {
		return 0, err
	}
	return r.Reader.Read(p)
}

// dataWriter cuts what is written into parts.
type dataWriter struct{ w io.Writer }

func (d dataWriter) Write(p []byte) (int, error) {
	for n := 0; n < len(p); {
		piece := p[n:min(n+agentwire.MaxInspectPart/2, len(p))]
		if err := agentwire.WritePart(d.w, agentwire.PartData, piece); err != nil {
			return n, err
		}
		n += len(piece)
	}
	return len(p), nil
}

// processes tells of every process and of the memory.
func (in *inspector) processes() error {
	names, err := readNames("/proc")
	if err != nil {
		return errdefs.New(errdefs.ErrInternal, "list processes: %w", err)
	}
	for _, name := range names {
		pid, err := strconv.Atoi(name)
		if err != nil {
			continue
		}
		m, ok := describeProcess(pid)
		if !ok {
			continue // it ended meanwhile
		}
		in.buf = m.Append(in.buf[:0])
		if err := agentwire.WritePart(in.out, agentwire.PartProcess, in.buf); err != nil {
			return err
		}
	}
	text, _ := readLimited("/proc/meminfo", 64<<10)
	m := agentwire.MemoryTotals{TotalKiB: memField(text, "MemTotal:"), AvailableKiB: memField(text, "MemAvailable:")}
	return agentwire.WritePart(in.out, agentwire.PartMemory, m.Append(nil))
}

// describeProcess reads the few fields of /proc that are told.
func describeProcess(pid int) (agentwire.ProcessEntry, bool) {
	m := agentwire.ProcessEntry{PID: pid}
	dir := "/proc/" + strconv.Itoa(pid)
	stat, err := readLimited(dir+"/stat", 4<<10)
	if err != nil {
		return m, false
	}
	open, end := bytes.IndexByte(stat, '('), bytes.LastIndexByte(stat, ')')
	if open < 0 || end < open {
		return m, false
	}
	m.Name = string(stat[open+1 : end])
	if f := strings.Fields(string(stat[end+1:])); len(f) > 21 {
		m.Parent, _ = strconv.Atoi(f[1])
		pages, _ := strconv.ParseInt(f[21], 10, 64)
		m.RSSKiB = pages * int64(os.Getpagesize()) / 1024
	}
	command, _ := readLimited(dir+"/cmdline", maxCommand)
	m.Command = strings.TrimSpace(string(bytes.ReplaceAll(command, []byte{0}, []byte{' '})))
	return m, true
}

func memField(text []byte, name string) int64 {
	for line := range strings.Lines(string(text)) {
		if f := strings.Fields(line); len(f) >= 2 && f[0] == name {
			n, _ := strconv.ParseInt(f[1], 10, 64)
			return n
		}
	}
	return 0
}
