package vmstate

import (
	"bytes"
	"encoding/binary"
	"errors"
	"flag"
	"hash/crc32"
	"os"
	"path/filepath"
	"reflect"
	"testing"

	"forkd.dev/forkd/internal/errdefs"
)

var update = flag.Bool("update", false, "write the golden files anew")

func fill(b byte, n int) []byte { return bytes.Repeat([]byte{b}, n) }

func sample() *State {
	s := &State{
		MemoryMiB: 512, TSCkHz: 2445422, CPUID: fill(1, 3*cpuidLen), Clock: fill(2, clockLen),
		IRQChips: [][]byte{fill(3, irqChipLen), fill(4, irqChipLen), fill(5, irqChipLen)},
		CPUs:     make([]CPU, 2),
		Devices:  []Device{{Kind: 1, State: []byte("uart")}, {Kind: 3, State: []byte{}}},
	}
	for i := range s.CPUs {
		for j := range s.CPUs[i].Items {
			s.CPUs[i].Items[j] = fill(byte(16*i+j), 4+j)
		}
		s.CPUs[i].MSRs = fill(byte(i), i*msrLen+msrLen)
	}
	return s
}

func encode(t testing.TB, s *State) []byte {
	t.Helper()
	b, err := Encode(s)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func TestRoundTrip(t *testing.T) {
	got, err := Decode(encode(t, sample()))
	if err != nil || !reflect.DeepEqual(got, sample()) {
		t.Fatalf("%+v, %v", got, err)
	}
}

func TestEncodeRefuses(t *testing.T) {
	for name, change := range map[string]func(*State){
		"no vCPUs":     func(s *State) { s.CPUs = nil },
		"many vCPUs":   func(s *State) { s.CPUs = make([]CPU, MaxCPUs+1) },
		"many devices": func(s *State) { s.Devices = make([]Device, MaxDevices+1) },
		"no memory":    func(s *State) { s.MemoryMiB = 0 },
		"CPUID":        func(s *State) { s.CPUID = s.CPUID[1:] },
		"clock":        func(s *State) { s.Clock = nil },
		"irqchips":     func(s *State) { s.IRQChips = s.IRQChips[1:] },
		"irqchip":      func(s *State) { s.IRQChips[1] = nil },
		"MSRs":         func(s *State) { s.CPUs[0].MSRs = fill(0, 17) },
		"item":         func(s *State) { s.CPUs[1].Items[7] = nil },
		"device":       func(s *State) { s.Devices[0].State = make([]byte, maxDevice+1) },
	} {
		s := sample()
		change(s)
		if _, err := Encode(s); !errors.Is(err, errdefs.ErrInvalid) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// rehash makes a changed file consistent again, as an attacker would.
func rehash(b []byte) []byte {
	binary.LittleEndian.PutUint32(b[24:], crc32.Checksum(b[headerLen:], castagnoli))
	return b
}

func TestDamage(t *testing.T) {
	le := binary.LittleEndian
	for name, c := range map[string]struct {
		want   error
		damage func(b []byte) []byte
	}{
		"empty":           {ErrSize, func([]byte) []byte { return nil }},
		"text":            {ErrMagic, func([]byte) []byte { return []byte("#!/bin/sh") }},
		"magic":           {ErrMagic, func(b []byte) []byte { b[0]++; return b }},
		"version":         {ErrVersion, func(b []byte) []byte { b[8]++; return b }},
		"truncated":       {ErrSize, func(b []byte) []byte { return b[:len(b)-1] }},
		"extended":        {ErrSize, func(b []byte) []byte { return append(b, 0) }},
		"huge":            {ErrSize, func(b []byte) []byte { return append(b, make([]byte, MaxBytes)...) }},
		"bit":             {ErrChecksum, func(b []byte) []byte { b[len(b)-1] ^= 1; return b }},
		"reserved":        {ErrContent, func(b []byte) []byte { b[28] = 1; return b }},
		"many sections":   {ErrContent, func(b []byte) []byte { le.PutUint32(b[12:], 1<<31); return b }},
		"fewer sections":  {ErrContent, func(b []byte) []byte { b[12]--; return b }},
		"offset":          {ErrContent, func(b []byte) []byte { b[headerLen+8]++; return rehash(b) }},
		"length wraps":    {ErrContent, func(b []byte) []byte { le.PutUint64(b[headerLen+16:], ^uint64(0)); return rehash(b) }},
		"kind":            {ErrContent, func(b []byte) []byte { b[headerLen] = 9; return rehash(b) }},
		"index":           {ErrContent, func(b []byte) []byte { b[headerLen+4] = 9; return rehash(b) }},
		"many vCPUs":      {ErrContent, func(b []byte) []byte { b[le.Uint64(b[headerLen+8:])] = 200; return rehash(b) }},
		"another machine": {ErrContent, func(b []byte) []byte { b[le.Uint64(b[headerLen+8:])] = 1; return rehash(b) }},
		"no memory":       {ErrContent, func(b []byte) []byte { clear(b[le.Uint64(b[headerLen+8:])+4:][:4]); return rehash(b) }},
	} {
		_, err := Decode(c.damage(encode(t, sample())))
		if !errors.Is(err, c.want) {
			t.Errorf("%s: %v, want %v", name, err, c.want)
		}
	}
}

// TestGoldenV1 fixes the bytes of version 1 in both directions.
func TestGoldenV1(t *testing.T) {
	path := filepath.Join("testdata", "v1.vmstate")
	made := encode(t, sample())
	if *update {
		if err := os.WriteFile(path, made, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	golden, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if got, err := Decode(golden); err != nil || !reflect.DeepEqual(got, sample()) {
		t.Errorf("golden file: %+v, %v", got, err)
	}
	if !bytes.Equal(golden, made) {
		t.Error("Encode makes other bytes than the golden file: this needs a new version")
	}
}

// FuzzDecode: what is accepted encodes to the same bytes.
func FuzzDecode(f *testing.F) {
	f.Add(encode(f, sample()))
	f.Fuzz(func(t *testing.T, b []byte) {
		if len(b) >= headerLen {
			rehash(b)
		}
		s, err := Decode(b)
		if err != nil {
			return
		}
		if again, err := Encode(s); err != nil || (!bytes.Equal(b, again) && !paddingDiffers(b, again)) {
			t.Fatalf("accepted state encodes to other bytes: %v", err)
		}
	})
}

// paddingDiffers: bytes between sections are not looked at.
func paddingDiffers(a, b []byte) bool {
	x, errA := Decode(a)
	y, errB := Decode(b)
	return errA == nil && errB == nil && reflect.DeepEqual(x, y)
}
