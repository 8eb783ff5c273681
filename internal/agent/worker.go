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

// settleHeap collects what is no longer used and takes objects of every small size,
// so that a fork finds memory that was written before: each first write to a page
// costs it the kernel's whole path of a page fault.
func settleHeap() {
	runtime.GC()
	var bytes [][]byte
	var pointers [][]*byte
	const perSize = 8
	for size := 8; size <= 2<<10; size += max(8, size/8&^7) {
		for range perSize {
			bytes = append(bytes, make([]byte, size))
			pointers = append(pointers, make([]*byte, size/8))
		}
	}
	runtime.KeepAlive(bytes)
	runtime.KeepAlive(pointers)
}
