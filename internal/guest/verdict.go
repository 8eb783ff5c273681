package guest

import (
	"context"
	"time"

	"forkd.dev/forkd/internal/agentwire"
	"forkd.dev/forkd/internal/errdefs"
)

const (
	// ClockTolerance is how far a guest's wall clock may be from the host's.
	ClockTolerance = 50 * time.Millisecond
	// clockRounds is how often a clock is corrected before the guest is given up.
	clockRounds = 3
)

// clockCheck judges read-backs of the guest's clock.
type clockCheck struct {
	now    func() time.Time
	sent   time.Time     // when the last host time was taken
	trip   time.Duration // of the last round
	best   time.Duration // of the shortest round; 0 before the first
	rounds int
	offset time.Duration // guest minus host, the middle of what is possible
}

// stamp returns the host time to send: ahead by half of the shortest round trip.
// Not of the last one: a trip that was long because the guest was not scheduled
// says nothing about the next.
func (k *clockCheck) stamp() time.Time {
	k.sent = k.now()
	return k.sent.Add(k.best / 2)
}

// right tells whether the guest, which told wall between our sending and now, is
// within the tolerance at the worst.
func (k *clockCheck) right(wall time.Time) bool {
	got := k.now()
	k.trip = max(got.Sub(k.sent), 0)
	if k.best == 0 || k.trip < k.best {
		k.best = k.trip
	}
	low, high := wall.Sub(got), wall.Sub(k.sent)
	k.offset = low + (high-low)/2
	return low >= -ClockTolerance && high <= ClockTolerance
}

// possible tells whether the guest can be within the tolerance: its offset is known
// to half of the last round trip. On an overloaded host no trip is short enough to
// prove more, and a fork must not fail for that.
func (k *clockCheck) possible() bool { return k.offset.Abs() <= ClockTolerance+k.trip/2 }

func (k *clockCheck) failure() error {
	return errdefs.WithHint(errdefs.New(errdefs.ErrGuest, "the guest's clock is %s off after %d corrections (round trip %s)", k.offset, clockRounds, k.trip),
		"the host may be overloaded; try again with fewer sandboxes at once")
}

// VerdictSource tells the guest that it is the source of a capture and goes on:
// it sets its clock and thaws. The clock is corrected until it is right.
func (c *Client) VerdictSource(ctx context.Context) error {
	const name = "verdict source"
	k := clockCheck{now: c.opts.Now}
	method := agentwire.MethodVerdictSource
	for {
		m := agentwire.Clock{Wall: k.stamp()}
		b, err := c.do(ctx, name, method, m.Append(nil), smallReply)
		if err != nil {
			return err
		}
		if err := decode(name, b, &m); err != nil {
			return err
		}
		if k.right(m.Wall) {
			return nil
		}
		if k.rounds++; k.rounds > clockRounds {
			if k.possible() {
				return nil
			}
			return wrap(name, k.failure())
		}
		method = agentwire.MethodClock
	}
}

// VerdictFork makes the guest the sandbox m describes and thaws it, and returns
// its receipt. HostTime is set here. On an error the guest's user processes have
// not run (if they were frozen), and the machine is of no use but to be killed.
func (c *Client) VerdictFork(ctx context.Context, m agentwire.Identity) (agentwire.Receipt, error) {
	receipt, err := c.verdictFork(ctx, m)
	if err != nil {
		return agentwire.Receipt{}, wrap("verdict fork", err)
	}
	return receipt, nil
}

func (c *Client) verdictFork(ctx context.Context, m agentwire.Identity) (agentwire.Receipt, error) {
	check := clockCheck{now: c.opts.Now}
	k := c.begin(smallReply, clockRounds+1)
	m.HostTime = check.stamp()
	if err := c.send(ctx, k, agentwire.MethodVerdictFork, m.Append(nil)); err != nil {
		return agentwire.Receipt{}, err
	}
	confirmed, err := c.clockRounds(ctx, k, &check)
	if err != nil {
		c.abandon(k)
		return agentwire.Receipt{}, err
	}
	b, err := c.wait(ctx, k)
	if err != nil {
		return agentwire.Receipt{}, err
	}
	if !confirmed {
		return agentwire.Receipt{}, errdefs.New(errdefs.ErrGuest, "the agent finished before its clock was confirmed")
	}
	var r agentwire.Receipt
	if err := decode("verdict fork", b, &r); err != nil {
		return agentwire.Receipt{}, err
	}
	if r.Generation != m.Generation {
		return agentwire.Receipt{}, errdefs.New(errdefs.ErrGuest, "the receipt is for generation %d, not %d", r.Generation, m.Generation)
	}
	cleanReceipt(&r)
	r.ClockOffset = check.offset
	if check.rounds > clockRounds {
		r.NotCovered = append(r.NotCovered, "the wall clock was checked to "+(check.trip/2).Round(time.Millisecond).String()+" only: the host was busy")
	}
	return r, nil
}

// clockRounds answers the guest's read-backs until its clock is right. It also
// returns (false) when the reply is there or the wait for it is over.
func (c *Client) clockRounds(ctx context.Context, k *call, check *clockCheck) (bool, error) {
	for {
		select {
		case m := <-k.notes:
			if check.right(m.Wall) {
				c.link.PostCoded(agentwire.FrameNote, k.id, agentwire.NoteClockOK, nil)
				return true, nil
			}
			if check.rounds++; check.rounds > clockRounds {
				if !check.possible() {
					return false, check.failure()
				}
				c.link.PostCoded(agentwire.FrameNote, k.id, agentwire.NoteClockOK, nil)
				return true, nil
			}
			correction := agentwire.Clock{Wall: check.stamp()}
			c.link.PostCoded(agentwire.FrameNote, k.id, agentwire.NoteClock, correction.Append(nil))
		case r := <-k.reply: // it failed earlier
			k.reply <- r
			return false, nil
		case <-c.link.Done():
			return false, nil
		case <-ctx.Done():
			return false, nil
		}
	}
}

const maxSteps = 256

// cleanReceipt bounds what a guest claims.
func cleanReceipt(r *agentwire.Receipt) {
	r.Steps = r.Steps[:min(len(r.Steps), maxSteps)]
	for i := range r.Steps {
		s := &r.Steps[i]
		s.Name, s.Status, s.Detail = clean(s.Name, 200), clean(s.Status, 40), clean(s.Detail, 4<<10)
	}
	r.NotCovered = r.NotCovered[:min(len(r.NotCovered), maxSteps)]
	for i := range r.NotCovered {
		r.NotCovered[i] = clean(r.NotCovered[i], 4<<10)
	}
}
