package block

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"forkd.dev/forkd/internal/layerfmt/cow1"
)

// killEnv makes the test binary the process that is going to be killed: "FILE SEED".
const killEnv = "FORKD_TEST_KILLED_DISK"

func TestMain(m *testing.M) {
	if spec := os.Getenv(killEnv); spec != "" {
		if err := writeUntilKilled(spec); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
	}
	os.Exit(m.Run())
}

const killBlocks = 2500

// operation i of a seed: most write a block full of the number i, some make it zero, some flush.
type operation struct {
	block uint64
	zero  bool
	flush bool
}

type operations struct{ r *rand.Rand }

func newOperations(seed uint64) operations { return operations{rand.New(rand.NewPCG(seed, 5))} }

func (o operations) next() operation {
	block := o.r.Uint64N(killBlocks)
	if o.r.IntN(2) == 0 {
		block %= 50 // some are written again and again
	}
	k := o.r.IntN(30)
	return operation{block: block, zero: k < 4, flush: k == 4}
}

func numbered(i uint64) []byte {
	b := make([]byte, 0, cow1.BlockSize)
	for range cow1.BlockSize / 8 {
		b = le.AppendUint64(b, i)
	}
	return b
}

// writeUntilKilled says the number of each flush on standard output, after it.
func writeUntilKilled(spec string) error {
	name, number, _ := strings.Cut(spec, " ")
	seed, err := strconv.ParseUint(number, 10, 64)
	if err != nil {
		return err
	}
	f, err := os.OpenFile(name, os.O_RDWR, 0)
	if err != nil {
		return err
	}
	top, err := cow1.Create(File{f}, cow1.Header{Blocks: killBlocks}, cow1.SyncHost)
	if err != nil {
		return err
	}
	disk, err := cow1.NewDisk(cow1.Chain{Top: top})
	if err != nil {
		return err
	}
	ops := newOperations(seed)
	for i := uint64(1); ; i++ {
		op := ops.next()
		off := int64(op.block) * cow1.BlockSize
		switch {
		case op.flush:
			if err = disk.Flush(); err == nil {
				fmt.Fprintln(os.Stdout, i)
			}
		case op.zero:
			err = disk.Zero(off, cow1.BlockSize)
		default:
			err = disk.WriteAt(numbered(i), off)
		}
		if err != nil {
			return err
		}
	}
}

// TestKilledProcess: what was flushed before kill -9 is there, and what was written after is old or new.
func TestKilledProcess(t *testing.T) {
	rounds := 25
	if testing.Short() {
		rounds = 4
	}
	for seed := range uint64(rounds) {
		name := filepath.Join(t.TempDir(), "overlay")
		if err := os.WriteFile(name, nil, 0o600); err != nil {
			t.Fatal(err)
		}
		flushed := runAndKill(t, name, seed, 1+rand.IntN(40))
		checkKilled(t, name, seed, flushed)
	}
}

// runAndKill ends the child at some moment after so many flushes and returns the last one it told.
func runAndKill(t *testing.T, name string, seed uint64, flushes int) uint64 {
	t.Helper()
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(t.Context(), exe)
	cmd.Env = append(os.Environ(), fmt.Sprintf("%s=%s %d", killEnv, name, seed))
	var complaint bytes.Buffer
	cmd.Stderr = &complaint
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	last, lines := uint64(0), bufio.NewScanner(out)
	for lines.Scan() {
		if last, err = strconv.ParseUint(lines.Text(), 10, 64); err != nil {
			t.Fatal(err)
		}
		if flushes--; flushes == 0 {
			if err := cmd.Process.Kill(); err != nil {
				t.Fatal(err)
			}
		}
	}
	_ = cmd.Wait() // it was killed
	if flushes > 0 {
		t.Fatalf("the child ended by itself: %s", complaint.String())
	}
	return last
}

func checkKilled(t *testing.T, name string, seed, flushed uint64) {
	t.Helper()
	f, err := os.OpenFile(name, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	st, err := f.Stat()
	if err != nil {
		t.Fatal(err)
	}
	top, err := cow1.Recover(File{f}, st.Size(), cow1.SyncHost)
	if err != nil {
		t.Fatalf("seed %d: %v", seed, err)
	}
	disk, err := cow1.NewDisk(cow1.Chain{Top: top})
	if err != nil {
		t.Fatal(err)
	}
	allowed := allowedContents(seed, flushed)
	b := make([]byte, cow1.BlockSize)
	for block := range uint64(killBlocks) {
		if err := disk.ReadAt(b, int64(block)*cow1.BlockSize); err != nil {
			t.Fatal(err)
		}
		v := le.Uint64(b)
		if !bytes.Equal(b, numbered(v)) || !allowed[block][v] {
			t.Fatalf("seed %d: block %d holds %d after the flush of step %d; allowed are %v", seed, block, v, flushed, allowed[block])
		}
	}
	if err := disk.Flush(); err != nil {
		t.Fatal(err)
	}
	if err := top.Seal(); err != nil {
		t.Fatal(err)
	}
	l, err := top.AsLayer()
	if err != nil {
		t.Fatal(err)
	}
	if err := l.Verify(context.Background()); err != nil {
		t.Fatal(err)
	}
}

// allowedContents replays the operations: what each block was at the flush, and what it may have become
// until the child was dead.
func allowedContents(seed, flushed uint64) []map[uint64]bool {
	allowed := make([]map[uint64]bool, killBlocks)
	for i := range allowed {
		allowed[i] = map[uint64]bool{0: true}
	}
	ops := newOperations(seed)
	for i := uint64(1); i < flushed+200_000; i++ {
		op := ops.next()
		if op.flush {
			continue
		}
		v := i
		if op.zero {
			v = 0
		}
		if i < flushed {
			clear(allowed[op.block])
		}
		allowed[op.block][v] = true
	}
	return allowed
}
