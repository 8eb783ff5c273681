package engine

// MergeFrom says which of some stacked layers, lowest first, are worth merging into
// one: those from the index returned to the end. It takes at least the topmost least
// of them, and each below that is not much larger than all above together, so that
// however long a stack grows each byte is copied a few times only and few layers stay.
func MergeFrom(sizes []int64, least int) int {
	from, above := len(sizes), int64(0)
	for from > 0 {
		next := sizes[from-1]
		if len(sizes)-from >= least && next > 2*above {
			break
		}
		from--
		above += next
	}
	return from
}
