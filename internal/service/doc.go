// Package service makes the daemon a service of systemd: it writes the unit file,
// the group that may use the daemon's socket, and tells systemd.
//
// It changes nothing before everything was checked, and each step may be repeated.
// Removing the service removes neither data nor running sandboxes.
package service
