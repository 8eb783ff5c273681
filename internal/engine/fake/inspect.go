package fake

import (
	"crypto/sha256"
	"encoding/binary"
	"maps"
	"slices"

	"forkd.dev/forkd/internal/agentwire"
	"forkd.dev/forkd/internal/errdefs"
)

// inspect answers questions about the disk: the files of a fake guest have mode 0644
// and times that change with their content. There is one process.
func (a *Agent) inspect(far *half) {
	var buf []byte
	for {
		_, body, grown, err := agentwire.ReadPart(far, buf)
		if err != nil {
			return
		}
		buf = grown
		var m agentwire.InspectRequest
		if err = m.Decode(body); err == nil {
			err = a.look(far, m)
		}
		if err != nil {
			told := agentwire.NewCallError(err)
			err = agentwire.WritePart(far, agentwire.PartError, told.Append(nil))
		} else {
			err = agentwire.WritePart(far, agentwire.PartEnd, nil)
		}
		if err != nil {
			return
		}
	}
}

func (a *Agent) look(far *half, m agentwire.InspectRequest) error {
	a.c.p.mu.Lock()
	disk := maps.Clone(a.c.p.content.Disk)
	a.c.p.mu.Unlock()
	switch m.Op {
	case agentwire.InspectWalk:
		for _, path := range slices.Sorted(maps.Keys(disk)) {
			sum := sha256.Sum256([]byte(disk[path]))
			f := agentwire.FileEntry{
				Path: path, Mode: 0o100644, Size: int64(len(disk[path])), Inode: 1, CTime: int64(binary.LittleEndian.Uint32(sum[:])),
			}
			if err := agentwire.WritePart(far, agentwire.PartFile, f.Append(nil)); err != nil {
				return err
			}
		}
		return nil
	case agentwire.InspectProcesses:
		p := agentwire.ProcessEntry{PID: 1, Name: "init", Command: "/init", RSSKiB: 1024}
		if err := agentwire.WritePart(far, agentwire.PartProcess, p.Append(nil)); err != nil {
			return err
		}
		totals := agentwire.MemoryTotals{TotalKiB: 1 << 19, AvailableKiB: 1 << 18}
		return agentwire.WritePart(far, agentwire.PartMemory, totals.Append(nil))
	}
	text, ok := disk[m.Path]
	switch {
	case !ok:
		return errdefs.New(errdefs.ErrNotFound, "there is no file %s", m.Path)
	case int64(len(text)) > m.Limit:
		return errdefs.New(errdefs.ErrResourceExhausted, "%s is larger than %d bytes", m.Path, m.Limit)
	case m.Op == agentwire.InspectDigest:
		sum := sha256.Sum256([]byte(text))
		return agentwire.WritePart(far, agentwire.PartData, sum[:])
	}
	return agentwire.WritePart(far, agentwire.PartData, []byte(text))
}
