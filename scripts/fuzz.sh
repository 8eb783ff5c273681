#!/usr/bin/env bash
# Runs every fuzz target, as many at a time as there are processors, with one worker
# each: those of the bytes of guests, layers and snapshots for the time given ($1,
# default 10s), the others for $2 (default $1). A failing input is kept by Go in the
# package's testdata/fuzz.
set -euo pipefail
cd "$(dirname "$0")/.."
deep_time=${1:-10s}
other_time=${2:-$deep_time}
deep='^internal/(agent|agentwire|guest|layerfmt|store/snapshot|vmm|vmmwire)(/|$)'
logs=$(mktemp -d -t forkd-fuzz.XXXXXX)
trap 'rm -rf "$logs"' EXIT

# Go's minute for making an interesting input smaller would eat the time given.
attempt() {
	go test -run '^$' -fuzz "^$2\$" -fuzztime "$3" -fuzzminimizetime 1s -parallel 1 "$1" >"$4" 2>&1
}

# A worker that is in the middle of an input when the time is over can make Go say
# "context deadline exceeded" and fail, without any finding: that is tried once more.
run_one() {
	local package=$1 name=$2 time=$3 log
	log=$4/$(tr / _ <<<"$package").$name
	local verdict=ok
	attempt "$package" "$name" "$time" "$log" || {
		verdict=FAILED
		if grep -q 'context deadline exceeded' "$log" && ! grep -q 'Failing input written' "$log" && attempt "$package" "$name" "$time" "$log"; then
			verdict='ok, the second time,'
		fi
	}
	echo "fuzz: $verdict $package $name: $(grep -o 'execs: [0-9]*' "$log" | tail -n 1) in $time"
	[[ $verdict != FAILED ]] || {
		cat "$log"
		touch "$log.failed"
	}
}
export -f run_one attempt

while IFS=: read -r file name; do
	package=./$(dirname "$file")
	time=$other_time
	[[ $(dirname "$file") =~ $deep ]] && time=$deep_time
	printf '%s\0%s\0%s\0%s\0' "$package" "$name" "$time" "$logs"
done < <(git grep --untracked -oE '^func Fuzz[A-Za-z0-9_]+' -- '*_test.go' | sed 's/:func /:/') >"$logs/todo"
count=$(($(tr -cd '\0' <"$logs/todo" | wc -c) / 4))
xargs -0 -n 4 -P "$(nproc)" bash -c 'run_one "$@"' fuzz <"$logs/todo"

failed=$(find "$logs" -name '*.failed' -printf '%f\n' | sed 's/\.failed$//')
if [[ -n $failed ]]; then
	printf 'fuzz: FAILED %s\n' $failed >&2
	exit 1
fi
echo "fuzz: $count targets, $deep_time or $other_time each, no finding"
