package vmmwire

import "forkd.dev/forkd/internal/errdefs"

// NetArgs are the Args of a network card with that Ethernet address.
func NetArgs(mac [6]byte) []byte { return mac[:] }

// ParseNetArgs returns the address. ErrInvalid: args are not those of a network card.
func ParseNetArgs(args []byte) (mac [6]byte, err error) {
	if len(args) != len(mac) {
		return mac, errdefs.New(errdefs.ErrInvalid, "arguments of a network card: %d bytes", len(args))
	}
	return [6]byte(args), nil
}
