#!/usr/bin/env bash
# Finds what forkd left on this host: processes, sockets, mounts, network
# namespaces and devices, control groups, temporary files.
#
#   leakcheck.sh                  fail if there is anything
#   leakcheck.sh list [IGNORE]    print it, one a line, sorted
#   leakcheck.sh since FILE [IGNORE]  fail if there is anything that FILE does not list
#
# IGNORE is a path that belongs to the caller. State in the data directory
# (images, snapshots) is kept on purpose and no leak.
set -euo pipefail
shopt -s nullglob

processes() {
	local dir pid exe name state ppid start stat
	for dir in /proc/[0-9]*; do
		pid=${dir#/proc/}
		exe=$(readlink "$dir/exe" 2>/dev/null) || continue
		name=$(basename "${exe% (deleted)}")
		stat=$(cat "$dir/stat" 2>/dev/null) || continue
		read -r state ppid _ <<<"${stat##*) }"
		start=$(awk '{print $20}' <<<"${stat##*) }")
		[[ $state == Z ]] && continue
		case $name in
		forkd | forkd-*) ;;
		qemu-system-*)
			# Somebody else's QEMU is none of ours; ours has its names in the arguments or the environment.
			tr '\0' ' ' <"$dir/cmdline" 2>/dev/null | grep -Eq 'forkd|(^|[^a-z0-9])(sb|im)[a-z0-9]{20}' || continue
			;;
		*.test)
			# A test binary (or a helper process of one) that outlived its parent.
			((ppid == 1)) || continue
			;;
		*) continue ;;
		esac
		echo "process $pid started $start: $name"
	done
}

sockets() {
	awk 'NR > 1 && $8 ~ /forkd/ { print "socket " $8 }' /proc/net/unix
}

mounts() {
	awk '$5 ~ /forkd/ { print "mount " $5 }' /proc/self/mountinfo
}

network() {
	local path
	for path in /run/netns/*forkd* /var/run/netns/*forkd*; do echo "network namespace ${path##*/}"; done
	for path in /sys/class/net/forkd*; do echo "network device ${path##*/}"; done
}

cgroups() {
	[[ -d /sys/fs/cgroup ]] || return 0
	# forkd-daemon is where a process of ours may live; it ends with its login session or unit.
	find /sys/fs/cgroup -type d -name 'forkd*' ! -name forkd-daemon -printf 'cgroup %p\n' 2>/dev/null || true
	find /sys/fs/cgroup -type d -path '*/forkd*/*' -printf 'cgroup %p\n' 2>/dev/null || true
}

files() {
	local dir path
	for dir in /tmp /var/tmp /dev/shm "${TMPDIR:-/tmp}"; do
		for path in "$dir"/*forkd* "$dir"/.*forkd*; do echo "temporary file $path"; done
	done
}

list() {
	local ignore=${1:-}
	{ processes; sockets; mounts; network; cgroups; files; } | sort -u |
		{ if [[ -n $ignore ]]; then grep -vF "$ignore" || true; else cat; fi; }
}

report() {
	if [[ -n $1 ]]; then
		echo "leakcheck: left behind:" >&2
		sed 's/^/  /' <<<"$1" >&2
		exit 1
	fi
	echo "leakcheck: nothing left behind"
}

case ${1:-} in
list) list "${2:-}" ;;
since) report "$(list "${3:-}" | comm -13 "$2" -)" ;;
"") report "$(list)" ;;
*)
	echo "usage: leakcheck.sh [list [IGNORE] | since FILE [IGNORE]]" >&2
	exit 2
	;;
esac
