// Package cli is forkd's command line over the Go client of sdk/go.
//
// Standard output carries only the result: a table for people, one id per line
// into a pipe or with -q, JSON with --json. Progress and errors go to standard
// error. Exit codes are in exit.go.
//
// Commands that make something only to use it (run, demo) start a private daemon
// if none runs, and remove all they made when they end, also by Ctrl-C. Commands
// that keep state never start one. What only the composition root can do (serve,
// doctor, cleanup, a private daemon) is injected by [Env].
package cli
