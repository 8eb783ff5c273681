package bench

import (
	"bytes"
	"encoding/binary"
	"errors"
	"os"
	"sync"
	"testing"

	"forkd.dev/forkd/internal/errdefs"
	"forkd.dev/forkd/internal/linux"
)

// TestCounterInAMemoryFile: it is found behind holes and beside a copy that stands
// still, and no hole is filled by the search.
func TestCounterInAMemoryFile(t *testing.T) {
	f, err := linux.MemFile("forkd-bench-test", 1<<30)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	marker := bytes.Repeat([]byte{0x5a, 0x11}, markerBytes/2)
	page := append(bytes.Clone(marker), make([]byte, linux.PageSize-markerBytes)...)
	const still, moving = 100 << 20, 700 << 20
	for _, at := range []int64{still, moving} {
		if _, err := f.WriteAt(page, at); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := findCounterInFile(os.Getpid(), marker, "/memfd:forkd-bench-test"); !errors.Is(err, errdefs.ErrUnavailable) {
		t.Errorf("nothing moves: %v", err)
	}
	stop := make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() {
		b := make([]byte, 8)
		for n := uint64(1); ; n++ {
			select {
			case <-stop:
				return
			default:
			}
			binary.LittleEndian.PutUint64(b, n)
			if _, err := f.WriteAt(b, moving+counterOffset); err != nil {
				t.Error(err)
				return
			}
		}
	})
	read, err := findCounterInFile(os.Getpid(), marker, "/memfd:forkd-bench-test")
	if err != nil || !moves(read) {
		t.Errorf("the counter: %v", err)
	}
	close(stop)
	wg.Wait()
	pages := int64(0)
	for off := int64(0); ; {
		start, end, ok, err := linux.NextData(f, off)
		if err != nil {
			t.Fatal(err)
		}
		if !ok {
			break
		}
		pages, off = pages+(end-start)/linux.PageSize, end
	}
	if pages != 2 {
		t.Errorf("the file has %d pages after the search", pages)
	}
	if _, err := findCounterInFile(os.Getpid(), marker, "/memfd:none"); !errors.Is(err, errdefs.ErrUnavailable) {
		t.Errorf("no such file: %v", err)
	}
}
