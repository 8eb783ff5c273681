package devices

import "time"

// Rate is a limit. The zero Rate is no limit.
type Rate struct {
	PerSecond uint64 // tokens, e.g. bytes
	Burst     uint64 // tokens that may be used at once after a pause; 0 means PerSecond
}

// Bucket enforces a Rate. It starts full. It is for one goroutine at a time.
type Bucket struct {
	rate   Rate
	tokens float64
	last   time.Duration
}

// NewBucket returns a full bucket whose time begins at now.
func NewBucket(r Rate, now time.Duration) Bucket {
	if r.Burst == 0 {
		r.Burst = r.PerSecond
	}
	return Bucket{rate: r, tokens: float64(r.Burst), last: now}
}

// Limited tells whether there is a limit at all.
func (b *Bucket) Limited() bool { return b.rate.PerSecond > 0 }

// Wait returns how long it takes until something may be used, 0 if now.
func (b *Bucket) Wait(now time.Duration) time.Duration {
	if !b.Limited() {
		return 0
	}
	if now > b.last {
		b.tokens = min(b.tokens+(now-b.last).Seconds()*float64(b.rate.PerSecond), float64(b.rate.Burst))
		b.last = now
	}
	// A whole token, but for what adding up fractions loses.
	if b.tokens >= 1-1e-9 {
		return 0
	}
	// Rounded up, so that a timer of that length finds a token.
	return time.Duration((1-b.tokens)/float64(b.rate.PerSecond)*float64(time.Second)) + 1
}

// Use takes n tokens. The bucket may go into debt, so that what is larger than the burst goes through
// too and is paid for afterwards.
func (b *Bucket) Use(n uint64) {
	if b.Limited() {
		b.tokens -= float64(n)
	}
}
