// Package cpio writes "newc" cpio archives, the format of an initramfs.
//
// The output depends only on what is written: inode numbers count up from one,
// owners are root and times are zero, so equal content gives equal bytes. Only
// what an initramfs of forkd needs exists: directories, files and character
// devices. There is no reader; the kernel is the reader.
package cpio

import (
	"fmt"
	"io"
	"strings"

	"forkd.dev/forkd/internal/errdefs"
)

const (
	magic   = "070701"
	trailer = "TRAILER!!!"
	align   = 4

	typeDir  = 0o040000
	typeFile = 0o100000
	typeChar = 0o020000

	maxName = 4095
	maxFile = 1<<32 - 1
)

// Writer writes one archive. Parent directories must be written before what is
// in them. After an error every further call returns it.
type Writer struct {
	out   io.Writer
	inode uint32
	pos   int64
	names map[string]bool // directories true, others false
	err   error
}

// NewWriter returns a Writer to out. The caller calls Close at the end, which
// does not close out.
func NewWriter(out io.Writer) *Writer {
	return &Writer{out: out, names: map[string]bool{}}
}

// Dir adds a directory with the permission bits perm.
func (w *Writer) Dir(name string, perm uint32) error {
	return w.entry(header{name: name, mode: typeDir | perm&0o7777, links: 2}, nil)
}

// File adds a regular file with the permission bits perm.
func (w *Writer) File(name string, perm uint32, data []byte) error {
	return w.entry(header{name: name, mode: typeFile | perm&0o7777, links: 1}, data)
}

// CharDevice adds a character device node.
func (w *Writer) CharDevice(name string, perm, major, minor uint32) error {
	return w.entry(header{name: name, mode: typeChar | perm&0o7777, links: 1, major: major, minor: minor}, nil)
}

// Close writes the end of the archive.
func (w *Writer) Close() error {
	if w.err != nil {
		return w.err
	}
	w.write(header{name: trailer, links: 1}, nil)
	if w.err == nil {
		w.err = errdefs.New(errdefs.ErrInternal, "cpio archive is closed")
		return nil
	}
	return w.err
}

type header struct {
	name         string
	mode, links  uint32
	major, minor uint32
}

func (w *Writer) entry(h header, data []byte) error {
	if w.err != nil {
		return w.err
	}
	if err := w.check(h.name, len(data)); err != nil {
		w.err = err
		return err
	}
	w.names[h.name] = h.mode&0o170000 == typeDir
	w.write(h, data)
	return w.err
}

func (w *Writer) check(name string, size int) error {
	bad := func(why string) error {
		return errdefs.New(errdefs.ErrInvalid, "write cpio entry %.80q: %s", name, why)
	}
	switch {
	case name == "" || len(name) > maxName || strings.ContainsRune(name, 0):
		return bad("the name is empty, too long or contains a NUL")
	case name == trailer:
		return bad("the name is reserved")
	case int64(size) > maxFile:
		return bad("the file is larger than 4 GiB")
	}
	if _, ok := w.names[name]; ok {
		return bad("the name was written before")
	}
	for _, part := range strings.Split(name, "/") {
		if part == "" || part == "." || part == ".." {
			return bad("the name is not a clean relative path")
		}
	}
	if i := strings.LastIndexByte(name, '/'); i >= 0 && !w.names[name[:i]] {
		return bad("its directory was not written before")
	}
	return nil
}

// write puts one entry: 13 fields of 8 hexadecimal digits after the magic, the
// name with a NUL, and the data, each padded to a multiple of 4.
func (w *Writer) write(h header, data []byte) {
	w.inode++
	fields := [13]uint32{
		w.inode, h.mode, 0, 0, // inode, mode, uid, gid
		h.links, 0, uint32(len(data)), // links, mtime, size
		0, 0, h.major, h.minor, // device of the archive, device it stands for
		uint32(len(h.name) + 1), 0, // size of the name, checksum (unused in newc)
	}
	var b strings.Builder
	b.WriteString(magic)
	for _, f := range fields {
		fmt.Fprintf(&b, "%08x", f)
	}
	b.WriteString(h.name)
	b.WriteByte(0)
	w.put([]byte(b.String()))
	w.pad()
	w.put(data)
	w.pad()
}

func (w *Writer) pad() {
	if rest := w.pos % align; rest != 0 {
		w.put(make([]byte, align-rest))
	}
}

func (w *Writer) put(p []byte) {
	if w.err != nil || len(p) == 0 {
		return
	}
	n, err := w.out.Write(p)
	w.pos += int64(n)
	if err != nil {
		w.err = fmt.Errorf("write cpio archive: %w", err)
	}
}
