#!/usr/bin/env bash
# Tests of the kvm engine. Natively: what needs no kernel in a guest. Then everything
# else in a machine whose /dev/kvm runs kernel code: this host if it does, or else an
# emulated one (test/nested). Arguments go to test/nested. Nonzero on any failure.
set -uo pipefail
cd "$(dirname "$0")/.."

cache=${FORKD_TEST_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/forkd-test}/nested
# The package map scan and asynchronous write protection came with Linux 6.7.
suite=${FORKD_NESTED_SUITE:-bookworm-backports}
work=$(mktemp -d -t forkd-test-kvm.XXXXXX)
trap 'rm -rf "$work"' EXIT

# kernel downloads and unpacks the cloud kernel of $suite, once, and prints where.
kernel() {
	local dir=$cache/$suite options package
	if [[ ! -e $dir/done ]]; then
		rm -rf "$dir" && mkdir -p "$dir"/{lists,archives}/partial "$dir/tree" || return
		echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] http://deb.debian.org/debian $suite main" >"$dir/sources.list"
		options=(-qq -o "Dir::Etc::sourcelist=$dir/sources.list" -o Dir::Etc::sourceparts=- -o "Dir::State::lists=$dir/lists"
			-o "Dir::Cache=$dir" -o APT::Sandbox::User=root)
		apt-get "${options[@]}" update >&2 || return
		package=$(apt-cache "${options[@]}" depends linux-image-cloud-amd64 | awk '/Depends: linux-image/ {print $2; exit}')
		[[ -n $package ]] || { echo "no cloud kernel in $suite" >&2; return 1; }
		(cd "$dir" && apt-get "${options[@]}" download "$package" >&2 && dpkg-deb -x linux-image-*.deb tree && rm linux-image-*.deb) || return
		rm -rf "$dir"/{lists,archives} && touch "$dir/done" || return
	fi
	echo "$dir/tree"
}

go build -o "$work/testsummary" ./scripts/testsummary || exit 1
go build -o "$work/nested" ./test/nested || exit 1

status=0
{
	if [[ -z ${FORKD_NESTED_ONLY:-} ]] && compgen -G 'internal/vmm/*' >/dev/null; then
		go test -count=1 -timeout 10m -json ./internal/vmm/... ./internal/vmmwire/... ./cmd/forkd-vmm/... || echo native >>"$work/failed"
	fi
	if tree=$(kernel); then
		"$work/nested" -kernel "$tree" "$@" || echo nested >>"$work/failed"
	else
		echo kernel >>"$work/failed"
	fi
} | "$work/testsummary" || status=1
[[ ! -e $work/failed ]] || status=1
exit $status
