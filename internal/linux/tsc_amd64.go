package linux

// readTSC reads the processor's time stamp counter, ordered against the
// instructions around it.
func readTSC() uint64
