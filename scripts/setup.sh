#!/usr/bin/env bash
# Installs what forkd needs on Debian and is missing. Says nothing but one line if nothing is.
set -euo pipefail

fail() { echo "setup: $*" >&2; exit 1; }

# program:package, one of each package's programs.
needs=(
	qemu-system-x86_64:qemu-system-x86
	mmdebstrap:mmdebstrap
	mke2fs:e2fsprogs
	xz:xz-utils
	newuidmap:uidmap
	zstd:zstd
	python3:python3
)

check_go() {
	command -v go >/dev/null || fail "no Go: install Go 1.26 or newer from https://go.dev/dl/ and put it into PATH"
	local version
	version=$(go env GOVERSION)
	version=${version#go}
	local major=${version%%.*} rest=${version#*.}
	local minor=${rest%%[!0-9]*}
	if ((major < 1 || (major == 1 && minor < 26))); then
		fail "Go $version is too old: install Go 1.26 or newer from https://go.dev/dl/"
	fi
}

missing_packages() {
	local need
	for need in "${needs[@]}"; do
		PATH="$PATH:/usr/sbin:/sbin" command -v "${need%%:*}" >/dev/null || echo "${need#*:}"
	done
	# The SDK test makes a virtual environment; ensurepip is what python3-venv adds.
	python3 -c 'import ensurepip, venv' 2>/dev/null || echo python3-venv
}

main() {
	[[ $(uname -s) == Linux ]] || fail "forkd runs on Linux, this is $(uname -s)"
	check_go
	local missing
	mapfile -t missing < <(missing_packages)
	if ((${#missing[@]} == 0)); then
		echo "setup: nothing to install"
		return
	fi
	command -v apt-get >/dev/null || fail "missing: ${missing[*]}. There is no apt-get here: install what gives you the same programs"
	local as_root=()
	if ((EUID != 0)); then
		command -v sudo >/dev/null || fail "missing: ${missing[*]}. Run as root: apt-get install --no-install-recommends ${missing[*]}"
		as_root=(sudo)
	fi
	echo "setup: installing ${missing[*]}"
	# Not local: the trap runs when this function has ended.
	log=$(mktemp -t forkd-setup.XXXXXX)
	trap 'rm -f "$log"' EXIT
	if ! { "${as_root[@]}" apt-get update -q &&
		"${as_root[@]}" env DEBIAN_FRONTEND=noninteractive \
			apt-get install -q -y --no-install-recommends "${missing[@]}"; } >"$log" 2>&1; then
		tail -n 20 "$log" >&2
		rm -f "$log"
		fail "apt-get failed: see above"
	fi
	rm -f "$log"
	mapfile -t missing < <(missing_packages)
	((${#missing[@]} == 0)) || fail "still missing after the installation: ${missing[*]}"
	echo "setup: done"
}

main "$@"
