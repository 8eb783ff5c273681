package guest

import (
	"context"
	"fmt"

	"forkd.dev/forkd/internal/agentwire"
	"forkd.dev/forkd/internal/errdefs"
)

// call is a call that waits for its reply.
type call struct {
	id      uint32
	limit   int // of the reply's body
	size    int
	body    []byte
	gone    bool // given up: the reply is dropped
	noteCap int
	notes   chan agentwire.Clock
	reply   chan reply
}

type reply struct {
	status byte
	body   []byte
}

// smallReply bounds replies that hold no output.
const smallReply = 1 << 20

// maxAbandoned bounds calls that were given up and that the guest never answers.
const maxAbandoned = 4096

// begin registers a call. noteCap is how many notes the guest may say within it.
func (c *Client) begin(limit, noteCap int) *call {
	c.mu.Lock()
	defer c.mu.Unlock()
	k := &call{id: c.freeIDLocked(), limit: limit, noteCap: noteCap, notes: make(chan agentwire.Clock, noteCap), reply: make(chan reply, 1)}
	c.calls[k.id] = k
	return k
}

// freeIDLocked returns an id that no call or stream uses. Streams are few and
// short against the 2^32 ids between two uses of one.
func (c *Client) freeIDLocked() uint32 {
	for {
		c.lastID++
		if c.lastID != 0 && c.calls[c.lastID] == nil {
			return c.lastID
		}
	}
}

// send sends the call's request.
func (c *Client) send(ctx context.Context, k *call, method agentwire.Method, body []byte) error {
	if len(body) > agentwire.MaxRequest {
		c.forget(k)
		return errdefs.New(errdefs.ErrInvalid, "a request of %d bytes exceeds %d", len(body), agentwire.MaxRequest)
	}
	begun, err := c.link.Send(ctx, agentwire.FrameCall, k.id, byte(method), body)
	switch {
	case err == nil:
		return nil
	case begun && len(k.reply) > 0:
		return nil // answered, and ended, before the transport had said that all was sent
	case begun:
		c.abandon(k)
	default:
		c.forget(k)
	}
	return err
}

// wait takes the reply of a call that was sent.
func (c *Client) wait(ctx context.Context, k *call) ([]byte, error) {
	select {
	case r := <-k.reply:
		return r.open()
	case <-ctx.Done():
		c.abandon(k)
		return nil, ctx.Err()
	case <-c.link.Done():
	}
	select { // it may have come right before the end
	case r := <-k.reply:
		return r.open()
	default:
		return nil, c.link.Err()
	}
}

func (r reply) open() ([]byte, error) {
	if r.status == agentwire.StatusOK {
		return r.body, nil
	}
	var told agentwire.CallError
	if err := told.Decode(r.body); err != nil {
		return nil, errdefs.New(errdefs.ErrGuest, "the agent told a broken error: %w", err)
	}
	return nil, told.Err()
}

// do makes a call from begin to end.
func (c *Client) do(ctx context.Context, name string, method agentwire.Method, body []byte, limit int) ([]byte, error) {
	k := c.begin(limit, 0)
	err := c.send(ctx, k, method, body)
	if err == nil {
		body, err = c.wait(ctx, k)
	}
	if err != nil {
		return nil, fmt.Errorf("%s in guest: %w", name, err)
	}
	return body, nil
}

func (c *Client) forget(k *call) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.calls, k.id)
}

// abandon gives a call up: the guest is told, and its reply is dropped.
func (c *Client) abandon(k *call) {
	c.mu.Lock()
	if c.calls[k.id] != k || k.gone {
		c.mu.Unlock()
		return
	}
	k.gone, k.body = true, nil
	c.abandoned++
	tooMany := c.abandoned > maxAbandoned
	c.mu.Unlock()
	if tooMany {
		// Only the guest is to blame: it answers none of them.
		go c.link.Close(errdefs.New(errdefs.ErrGuest, "the agent left %d canceled calls unanswered", maxAbandoned))
		return
	}
	c.link.Post(agentwire.FrameCancel, k.id, nil)
}

// handleReply takes a part of a reply, or a note.
func (c *Client) handleReply(f agentwire.Frame) error {
	flags, code, body, ok := f.Coded()
	if !ok {
		return errdefs.New(errdefs.ErrGuest, "agent channel: reply frame of %d bytes", len(f.Payload))
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	k := c.calls[f.ID]
	if k == nil {
		return errdefs.New(errdefs.ErrGuest, "agent channel: reply to call %d that was not made", f.ID)
	}
	if f.Type == agentwire.FrameNote {
		return k.handleNote(code, body)
	}
	// An empty part with more to come would let a guest reply without end.
	more := flags&agentwire.FlagMore != 0
	k.size += len(body)
	if k.size > k.limit || more && len(body) == 0 {
		return errdefs.New(errdefs.ErrGuest, "agent channel: reply to call %d exceeds its %d bytes", f.ID, k.limit)
	}
	if !k.gone {
		k.body = append(k.body, body...)
	}
	if more {
		return nil
	}
	delete(c.calls, f.ID)
	if k.gone {
		c.abandoned--
		return nil
	}
	k.reply <- reply{status: code, body: k.body}
	return nil
}

func (k *call) handleNote(code byte, body []byte) error {
	var m agentwire.Clock
	if code != agentwire.NoteClocked || m.Decode(body) != nil || k.noteCap == 0 {
		return errdefs.New(errdefs.ErrGuest, "agent channel: unexpected note %d in call %d", code, k.id)
	}
	k.noteCap--
	k.notes <- m // has room for noteCap notes
	return nil
}
