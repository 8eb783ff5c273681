// Package floor carries source/floor.c: what forking a small VM costs at least.
package floor

import _ "embed"

// Source is the C program.
//
//go:embed source/floor.c
var Source []byte
