#!/usr/bin/env bash
# Makes docs/demo.png, the picture of README, from a real run of the demo. The
# renderer is fetched as a Go program the first time; nothing else needs it.
set -euo pipefail
cd "$(dirname "$0")/.."

bin=.cache/bin
mkdir -p "$bin"
[[ -x $bin/freeze ]] || GOBIN=$PWD/$bin go install github.com/charmbracelet/freeze@v0.2.2
out=$(mktemp -t forkd-picture.XXXXXX)
trap 'rm -f "$out"' EXIT
{
	echo "$ forkd demo -n 20"
	bin/forkd demo -n 20 2>/dev/null
} >"$out"
"$bin/freeze" --language text --window --padding 20 --font.size 13 -o docs/demo.png "$out"
