package devices

// Gather copies the first bytes of the buffers to p and returns how many.
func Gather(p []byte, from [][]byte) int {
	n := 0
	for _, b := range from {
		n += copy(p[n:], b)
		if n == len(p) {
			break
		}
	}
	return n
}

// Scatter copies p to the start of the buffers and returns how many bytes found place.
func Scatter(to [][]byte, p []byte) int {
	n := 0
	for _, b := range to {
		n += copy(b, p[n:])
		if n == len(p) {
			break
		}
	}
	return n
}

// Skip returns the buffers without their first n bytes; it changes the slice in place. n is at most
// their length.
func Skip(bufs [][]byte, n uint64) [][]byte {
	for len(bufs) > 0 && n >= uint64(len(bufs[0])) {
		n -= uint64(len(bufs[0]))
		bufs = bufs[1:]
	}
	if n > 0 && len(bufs) > 0 {
		bufs[0] = bufs[0][n:]
	}
	return bufs
}
