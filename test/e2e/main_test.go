package e2e

import (
	"flag"
	"fmt"
	"os"
	"os/signal"
	"sync"
	"syscall"
	"testing"
)

var (
	givenProgram = flag.String("forkd", "", "test this program instead of one built from this tree")
	givenData    = flag.String("data", "", "use and keep this data directory, to save the preparation")
)

// suite is the one daemon of the package.
var suite struct {
	once  sync.Once
	world *world
	err   error
}

func TestMain(m *testing.M) {
	flag.Parse()
	interrupt := make(chan os.Signal, 1)
	signal.Notify(interrupt, os.Interrupt, syscall.SIGTERM)
	done := make(chan int, 1)
	go func() { done <- m.Run() }()
	code := 0
	select {
	case code = <-done:
	case <-interrupt:
		code = 130
	}
	if suite.world != nil {
		if err := suite.world.close(); err != nil {
			fmt.Fprintln(os.Stderr, "e2e: left behind at the end:", err)
			code = max(code, 1)
		}
	}
	os.Exit(code)
}

// running returns the world with its daemon up and no sandbox in it.
func running(t *testing.T) *world {
	t.Helper()
	switch {
	case testing.Short():
		t.Skip("real machines take minutes: left out by -short")
	case os.Geteuid() != 0:
		t.Skipf("needs root for the confinement of machines: uid is %d", os.Geteuid())
	}
	suite.once.Do(func() { suite.world, suite.err = newWorld() })
	w := suite.world
	if suite.err == nil && !w.up() {
		suite.err = w.start()
	}
	if suite.err != nil {
		t.Fatalf("no daemon to test: %v", suite.err)
	}
	from := w.logSize()
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("the daemon's log:\n%s", w.logSince(from))
		}
		w.restart(t)
		w.killAll(t)
	})
	return w
}
