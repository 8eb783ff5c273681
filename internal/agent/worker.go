package agent

import "runtime"

// workerRoom keeps a worker's stack at twice its size: as long as more than a
// quarter is in use, a collection does not shrink it.
const workerRoom = 18 << 10

// worker answers one call at a time on a goroutine whose stack has grown already:
// growing it for the first call of a fork would be a good part of that fork's work.
type worker struct {
	calls chan func()
	done  chan struct{}
}

func newWorker() *worker {
	w := &worker{calls: make(chan func()), done: make(chan struct{})}
	go func() {
		defer close(w.done)
		withRoom(func() {
			for f := range w.calls {
				f()
			}
		})
	}()
	return w
}

// withRoom calls f with a grown stack.
//
//go:noinline
func withRoom(f func()) {
	var room [workerRoom]byte
	use(&room)
	f()
	use(&room)
}

//go:noinline
func use(room *[workerRoom]byte) { room[0]++ }

// run runs f on the worker, or on a goroutine of its own if the worker is busy.
func (w *worker) run(f func()) {
	if w != nil {
		select {
		case w.calls <- f:
			return
		default:
		}
	}
	go f()
}

// close ends the worker. Precondition: nothing runs on it.
func (w *worker) close() {
	close(w.calls)
	<-w.done
}

// settleHeap leaves the heap so that a fork finds memory that was written before:
// each first write to a page costs it the kernel's whole path of a page fault.
func settleHeap() {
	takeSmall(64)
	runtime.GC()
	takeSmall(1)
}

// takeSmall takes n objects of about every size there is, with and without
// pointers, and writes to them.
func takeSmall(n int) {
	var bytes [][]byte
	var pointers [][]*byte
	for size := 8; size <= 16<<10; size += max(8, size/8&^7) {
		for range min(n, 1+64<<10/size) {
			b, p := make([]byte, size), make([]*byte, size/8)
			for i := 0; i < size; i += 256 {
				b[i], p[i/8] = 1, &b[0]
			}
			bytes, pointers = append(bytes, b), append(pointers, p)
		}
	}
	runtime.KeepAlive(bytes)
	runtime.KeepAlive(pointers)
}
