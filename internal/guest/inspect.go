package guest

import (
	"bufio"
	"context"
	"crypto/sha256"
	"fmt"

	"forkd.dev/forkd/internal/agentwire"
	"forkd.dev/forkd/internal/errdefs"
)

// Inspector asks an agent about files and processes of its guest, also while user
// processes are frozen. It is used by one goroutine, and its owner closes it.
type Inspector struct {
	ctx context.Context
	s   *stream
	r   *bufio.Reader
	buf []byte
}

// OpenInspector opens an inspector that ends with ctx. ErrUnsupported: the agent is
// too old.
func OpenInspector(ctx context.Context, o Opener) (*Inspector, error) {
	s, err := open(ctx, o, agentwire.StreamInspect)
	if err != nil {
		return nil, fmt.Errorf("look into guest: %w", err)
	}
	return &Inspector{ctx: ctx, s: s, r: bufio.NewReaderSize(s, 64<<10)}, nil
}

// Close ends the inspector.
func (i *Inspector) Close() error { return i.s.Close() }

// ask sends a request and hands each part of the answer to take.
func (i *Inspector) ask(m agentwire.InspectRequest, take func(kind agentwire.Part, body []byte) error) error {
	err := agentwire.WritePart(i.s, 0, m.Append(nil))
	for err == nil {
		var kind agentwire.Part
		var body []byte
		if kind, body, i.buf, err = agentwire.ReadPart(i.r, i.buf); err != nil {
			err = nonsense(err)
			break
		}
		switch kind {
		case agentwire.PartEnd:
			return nil
		case agentwire.PartError:
			var told agentwire.CallError
			if err := told.Decode(body); err != nil {
				return nonsense(err)
			}
			return told.Err()
		}
		err = take(kind, body)
	}
	return ended(i.ctx, err)
}

// nonsense says that the guest broke the protocol: damage of its making is no damage of
// ours.
func nonsense(err error) error {
	if err == nil {
		return nil
	}
	return errdefs.New(errdefs.ErrGuest, "%v", err)
}

// strange says that an answer has a part that does not belong to it.
func strange(kind agentwire.Part) error {
	return errdefs.New(errdefs.ErrGuest, "part of kind %d in an answer it does not belong to", kind)
}

// Walk hands every file of the guest's root file system to each, in no order. What a
// guest says is a claim: a path may come twice.
func (i *Inspector) Walk(each func(agentwire.FileEntry) error) error {
	count := 0
	err := i.ask(agentwire.InspectRequest{Op: agentwire.InspectWalk, Path: "/"}, func(kind agentwire.Part, body []byte) error {
		if kind != agentwire.PartFile {
			return strange(kind)
		}
		if count++; count > agentwire.MaxInspectFiles {
			return errdefs.New(errdefs.ErrResourceExhausted, "more than %d files", agentwire.MaxInspectFiles)
		}
		var f agentwire.FileEntry
		if err := f.Decode(body); err != nil {
			return nonsense(err)
		}
		return each(f)
	})
	if err != nil {
		return fmt.Errorf("list files of guest: %w", err)
	}
	return nil
}

// Digest returns the SHA-256 of a regular file of at most limit bytes.
func (i *Inspector) Digest(path string, limit int64) (sum [sha256.Size]byte, err error) {
	got := 0
	err = i.ask(agentwire.InspectRequest{Op: agentwire.InspectDigest, Path: path, Limit: limit}, func(kind agentwire.Part, body []byte) error {
		if kind != agentwire.PartData || len(body) != sha256.Size {
			return strange(kind)
		}
		got++
		copy(sum[:], body)
		return nil
	})
	if err == nil && got != 1 {
		err = errdefs.New(errdefs.ErrGuest, "%d digests came", got)
	}
	if err != nil {
		return sum, fmt.Errorf("digest of %.200q in guest: %w", path, err)
	}
	return sum, nil
}

// Content returns a regular file of at most limit bytes.
func (i *Inspector) Content(path string, limit int64) ([]byte, error) {
	var out []byte
	err := i.ask(agentwire.InspectRequest{Op: agentwire.InspectContent, Path: path, Limit: limit}, func(kind agentwire.Part, body []byte) error {
		if kind != agentwire.PartData {
			return strange(kind)
		}
		if int64(len(out)+len(body)) > limit {
			return errdefs.New(errdefs.ErrGuest, "more than the %d bytes asked for came", limit)
		}
		out = append(out, body...)
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("read %.200q in guest: %w", path, err)
	}
	return out, nil
}

// maxProcesses bounds what is believed of a guest's processes.
const maxProcesses = 100_000

// Processes lists the guest's processes and how much memory it has.
func (i *Inspector) Processes() (list []agentwire.ProcessEntry, memory agentwire.MemoryTotals, err error) {
	err = i.ask(agentwire.InspectRequest{Op: agentwire.InspectProcesses}, func(kind agentwire.Part, body []byte) error {
		switch kind {
		case agentwire.PartProcess:
			if len(list) == maxProcesses {
				return errdefs.New(errdefs.ErrResourceExhausted, "more than %d processes", maxProcesses)
			}
			var p agentwire.ProcessEntry
			if err := p.Decode(body); err != nil {
				return nonsense(err)
			}
			list = append(list, p)
			return nil
		case agentwire.PartMemory:
			return nonsense(memory.Decode(body))
		}
		return strange(kind)
	})
	if err != nil {
		return nil, memory, fmt.Errorf("list processes of guest: %w", err)
	}
	return list, memory, nil
}
