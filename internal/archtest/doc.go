// Package archtest checks the rules of the code base that no other tool knows:
// layers.txt, package docs, sizes, banned names and calls, where unsafe and raw
// system calls stand, and that the README names every top folder.
//
// It has no code outside of its tests and uses the standard library only, so that
// it runs in a second with nothing installed. CONTRIBUTING.md lists the rules.
package archtest
