#!/usr/bin/env bash
# Runs every fuzz target, one after the other: those of the bytes of guests, layers
# and snapshots for the time given ($1, default 10s), the others for $2 (default $1).
set -euo pipefail
cd "$(dirname "$0")/.."
deep_time=${1:-10s}
other_time=${2:-$deep_time}
deep='^internal/(agent|agentwire|guest|layerfmt|store/snapshot)(/|$)'

failed=()
count=0
while IFS=: read -r file name; do
	package=./$(dirname "$file")
	time=$other_time
	[[ $(dirname "$file") =~ $deep ]] && time=$deep_time
	count=$((count + 1))
	# Go's minute for making an interesting input smaller would eat the time given.
	echo "fuzz: $package $name for $time"
	go test -run '^$' -fuzz "^${name}\$" -fuzztime "$time" -fuzzminimizetime 1s "$package" || failed+=("$package $name")
done < <(git grep --untracked -oE '^func Fuzz[A-Za-z0-9_]+' -- '*_test.go' | sed 's/:func /:/')

if ((${#failed[@]} > 0)); then
	printf 'fuzz: FAILED %s\n' "${failed[@]}" >&2
	exit 1
fi
echo "fuzz: $count targets, $deep_time or $other_time each, no finding"
