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
	mkfs.erofs:erofs-utils
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

# backport installs runsc, for the gvisor engine, from bookworm-backports: bookworm's own
# is too old. The package list is read into a directory of ours, not into the host's.
backport() {
	command -v runsc >/dev/null && return 1
	grep -q '^VERSION_CODENAME=bookworm' /etc/os-release && command -v apt-get >/dev/null && [[ -r /usr/share/keyrings/debian-archive-keyring.gpg ]] || return 1
	local as_root=()
	((EUID == 0)) || as_root=(sudo)
	echo "setup: installing runsc of bookworm-backports"
	dir=$(mktemp -d -t forkd-setup.XXXXXX)
	trap 'rm -rf "$dir"' EXIT
	mkdir -p "$dir/lists/partial" "$dir/parts"
	chmod 755 "$dir"
	local mirror
	mirror=$(awk '/^URIs:/ { print $2; exit }' /etc/apt/sources.list.d/debian.sources 2>/dev/null || true)
	echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] ${mirror:-http://deb.debian.org/debian} bookworm-backports main" >"$dir/sources.list"
	local options=(-o "Dir::Etc::SourceList=$dir/sources.list" -o "Dir::Etc::SourceParts=$dir/parts" -o "Dir::State::Lists=$dir/lists"
		-o "Dir::Cache::pkgcache=" -o "Dir::Cache::srcpkgcache=" -o APT::Sandbox::User=root)
	if ! { "${as_root[@]}" apt-get -q "${options[@]}" update &&
		(cd "$dir" && "${as_root[@]}" apt-get -q "${options[@]}" download runsc) &&
		"${as_root[@]}" env DEBIAN_FRONTEND=noninteractive dpkg -i "$dir"/runsc_*.deb; } >"$dir/log" 2>&1; then
		# Everything else works without it, and says how to get it.
		tail -n 3 "$dir/log" >&2
		echo "setup: no runsc: the gvisor engine is left out (forkd engine install gvisor)" >&2
	fi
	"${as_root[@]}" rm -rf "$dir"
}

main() {
	[[ $(uname -s) == Linux ]] || fail "forkd runs on Linux, this is $(uname -s)"
	check_go
	local missing
	mapfile -t missing < <(missing_packages)
	if ((${#missing[@]} == 0)); then
		backport || echo "setup: nothing to install"
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
	backport || true
	echo "setup: done"
}

main "$@"
