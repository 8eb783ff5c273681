// Package sandbox is forkd's policy: the life of sandboxes, snapshots and images
// as one state machine over the engine, the store and the guest agent.
//
// Front ends translate requests into calls of [Service] and nothing else; below
// it, code does what it is told.
package sandbox
