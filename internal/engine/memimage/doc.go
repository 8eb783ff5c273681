// Package memimage holds the memory of snapshots for engines that store it as layers
// (internal/layerfmt): it merges the layers of a chain into one sealed memory file that
// any number of machines map privately, the *resident image*, and keeps those in use.
package memimage
