// Package ident makes and checks the names of forkd's objects: ids, tags,
// names and labels.
//
// An id is a two-letter kind and 20 random characters of [a-z0-9] (103 bits),
// never reused. A tag or name must not have the form of an id.
package ident

import (
	"crypto/rand"
	"regexp"

	"forkd.dev/forkd/internal/errdefs"
)

// Kind is the two-letter prefix of an id.
type Kind string

// The kinds of objects that have ids.
const (
	Sandbox    Kind = "sb"
	Snapshot   Kind = "sn"
	Image      Kind = "im"
	Checkpoint Kind = "ck"
)

const (
	alphabet   = "abcdefghijklmnopqrstuvwxyz0123456789"
	randomPart = 20
)

var (
	idForm    = regexp.MustCompile(`^(sb|sn|im|ck)[a-z0-9]{20}$`)
	tagForm   = regexp.MustCompile(`^[A-Za-z0-9_][A-Za-z0-9._-]{0,63}$`)
	labelForm = regexp.MustCompile(`^[A-Za-z0-9]([A-Za-z0-9._/-]{0,61}[A-Za-z0-9])?$`)
)

// New returns a fresh random id of kind.
func New(kind Kind) string {
	// 252 is the largest multiple of 36 below 256: larger bytes are redrawn, so
	// every character is equally likely.
	const limit = 256 - 256%len(alphabet)
	out := make([]byte, 0, randomPart)
	var buf [2 * randomPart]byte
	for len(out) < randomPart {
		rand.Read(buf[:]) // never fails since Go 1.24
		for _, b := range buf {
			if int(b) < limit && len(out) < randomPart {
				out = append(out, alphabet[int(b)%len(alphabet)])
			}
		}
	}
	return string(kind) + string(out)
}

// IsID tells whether s has the form of an id of any kind.
func IsID(s string) bool { return idForm.MatchString(s) }

// KindOf returns the kind of an id, or "" if s is no id.
func KindOf(s string) Kind {
	if !IsID(s) {
		return ""
	}
	return Kind(s[:2])
}

// CheckTag tells whether s can be a tag or a name.
func CheckTag(s string) error {
	switch {
	case !tagForm.MatchString(s):
		return errdefs.WithHint(errdefs.New(errdefs.ErrInvalid, "tag %.80q is not of the form [A-Za-z0-9_][A-Za-z0-9._-]{0,63}", s),
			"use letters, digits, '.', '_' and '-', at most 64, not starting with '.' or '-'")
	case IsID(s):
		return errdefs.New(errdefs.ErrInvalid, "tag %q has the form of an id", s)
	}
	return nil
}

// CheckRef tells whether s can be a reference: an id, an id prefix, a tag or a name.
func CheckRef(s string) error {
	if IsID(s) {
		return nil
	}
	if !tagForm.MatchString(s) {
		return errdefs.New(errdefs.ErrInvalid, "reference %.80q is neither an id nor a tag or name", s)
	}
	return nil
}

// CheckLabel tells whether key=value can be a label: keys as in Kubernetes,
// values of at most 256 bytes.
func CheckLabel(key, value string) error {
	if !labelForm.MatchString(key) {
		return errdefs.New(errdefs.ErrInvalid, "label key %.80q is not of the form [A-Za-z0-9][A-Za-z0-9._/-]{0,62}", key)
	}
	if len(value) > 256 {
		return errdefs.New(errdefs.ErrInvalid, "value of label %s has %d bytes, more than 256", key, len(value))
	}
	return nil
}
