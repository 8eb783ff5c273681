#!/usr/bin/env bash
# Runs every fuzz target for the time given ($1, default 10s), one after the other.
set -euo pipefail
cd "$(dirname "$0")/.."
time=${1:-10s}

failed=()
count=0
while IFS=: read -r file name; do
	package=./$(dirname "$file")
	count=$((count + 1))
	echo "fuzz: $package $name for $time"
	go test -run '^$' -fuzz "^${name}\$" -fuzztime "$time" "$package" || failed+=("$package $name")
done < <(git grep --untracked -oE '^func Fuzz[A-Za-z0-9_]+' -- '*_test.go' | sed 's/:func /:/')

if ((${#failed[@]} > 0)); then
	printf 'fuzz: FAILED %s\n' "${failed[@]}" >&2
	exit 1
fi
echo "fuzz: $count targets, $time each, no finding"
