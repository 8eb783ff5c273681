package bench

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"

	"forkd.dev/forkd/internal/errdefs"
	"forkd.dev/forkd/internal/linux"
)

// gvisorMemory begins the name of the file that holds all memory of a sandbox of
// gVisor; its kernel and the processes of the sandbox map it shared.
const gvisorMemory = "/memfd:runsc-memory"

// findCounterInFile looks for the counter in the memory file of that name that
// process pid has open. What it returns reads the file as long as it is in use.
func findCounterInFile(pid int, marker []byte, name string) (func() (uint64, error), error) {
	links, err := filepath.Glob(fmt.Sprintf("/proc/%d/fd/*", pid))
	if err != nil {
		return nil, fmt.Errorf("list descriptors of process %d: %w", pid, err)
	}
	for _, link := range links {
		target, err := os.Readlink(link)
		if err != nil || !strings.HasPrefix(target, name) {
			continue
		}
		f, err := os.Open(link)
		if err != nil {
			return nil, errdefs.As(errdefs.ErrUnavailable, err)
		}
		read, err := searchFile(f, marker)
		if read != nil || err != nil {
			return read, err
		}
		_ = f.Close()
	}
	return nil, errdefs.New(errdefs.ErrUnavailable, "no counter with its marker moves in a memory file of process %d", pid)
}

// searchFile looks at the pages that f has; a hole must not be read, which would
// fill it. The result is nil if the counter is not there.
func searchFile(f *os.File, marker []byte) (func() (uint64, error), error) {
	buf := make([]byte, 1024*linux.PageSize)
	for off := int64(0); ; {
		start, end, ok, err := linux.NextData(f, off)
		if err != nil || !ok {
			return nil, err
		}
		for at := start; at < end; {
			n, err := f.ReadAt(buf[:min(int64(len(buf)), end-at)], at)
			if n == 0 {
				if err == io.EOF {
					return nil, nil
				}
				return nil, errdefs.As(errdefs.ErrUnavailable, err)
			}
			for page := 0; page < n; page += linux.PageSize {
				if !bytes.HasPrefix(buf[page:n], marker) {
					continue
				}
				if read := counterIn(f, at+int64(page)+counterOffset); moves(read) {
					return read, nil
				}
			}
			at += int64(n)
		}
		off = end
	}
}

func counterIn(f *os.File, at int64) func() (uint64, error) {
	buf := make([]byte, 8)
	return func() (uint64, error) {
		_, err := f.ReadAt(buf, at)
		return binary.LittleEndian.Uint64(buf), err
	}
}
