// Package enginetest is the conformance suite of package engine: what every engine
// has to do, whatever it runs machines with.
//
// An engine's test calls [Run] with a [Harness], which says how to open a driver and
// how to talk to the guest. One machine is booted for the whole suite; all other
// machines are forks of its capture, so that the suite is bearable for engines whose
// boot takes seconds. What an engine declares missing is logged with its reason.
//
// The suite checks the contract through the contract only: it knows no file format
// and no process. After every part Orphans must list nothing of it.
package enginetest
