package devices

import "time"

// SystemClock is the host's monotonic clock.
type SystemClock struct{ start time.Time }

// NewSystemClock returns a clock that starts now.
func NewSystemClock() SystemClock { return SystemClock{start: time.Now()} }

// Now implements [Clock].
func (c SystemClock) Now() time.Duration { return time.Since(c.start) }

// AfterFunc implements [Clock].
func (c SystemClock) AfterFunc(d time.Duration, f func()) Timer { return time.AfterFunc(d, f) }
