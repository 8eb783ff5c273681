#!/usr/bin/env bash
# Runs all Go tests, lists skips with their reasons, then looks for what they left
# behind. Arguments go to `go test`. Nonzero on any failure or leak.
set -uo pipefail
cd "$(dirname "$0")/.."

work=$(mktemp -d -t forkd-test.XXXXXX)
trap 'rm -rf "$work"' EXIT

go build -o "$work/testsummary" ./scripts/testsummary || exit 1
# What runs already (somebody's own daemon) is not the tests' fault.
scripts/leakcheck.sh list "$work" >"$work/before"

go test -count=1 -timeout 25m -json "$@" ./... 2>"$work/stderr" | "$work/testsummary"
status=${PIPESTATUS[1]}
go_status=${PIPESTATUS[0]}
if ((go_status != 0)); then
	cat "$work/stderr" >&2
fi

scripts/leakcheck.sh since "$work/before" "$work" || status=1
exit $((status != 0 || go_status != 0))
