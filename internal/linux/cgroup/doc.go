// Package cgroup makes and removes control groups, on cgroup v1, v2 and hybrid
// hosts alike, without policy.
//
// A [Group] is one name ("forkd"/leaf) in every hierarchy that its limits need,
// below the control group of the process that creates it, so it works inside of
// containers and delegated systemd units. A limit that cannot be applied is an
// error; nothing is left behind then.
//
// The kernel keeps the state: a Group value is only paths, may be copied, used
// concurrently, dropped, and found again after a crash with [Open] or [List].
// Those search the whole hierarchy, because a restarted daemon may live in another
// control group than the one that made the group.
//
// On v2, a systemd service makes its groups beside itself, in its slice: groups
// inside would keep it from being started again while they live.
//
// Elsewhere on v2 a group with processes of its own cannot hand controllers to
// subgroups. If that stands in the way and the calling process is alone in its group, Create
// moves it into a leaf named forkd-daemon beside the new groups. It moves no other
// process: with company (a login session) it uses the top of the hierarchy, which
// needs root.
package cgroup
