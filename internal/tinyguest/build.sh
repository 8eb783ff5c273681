#!/bin/sh
# build.sh [OUT]: makes guest.elf from source/. Needs gcc and binutils.
set -e
dir=$(cd "$(dirname "$0")" && pwd)
out=${1:-$dir/guest.elf}
gcc -O2 -ffreestanding -fno-pic -mcmodel=small -mno-red-zone -mgeneral-regs-only -fno-stack-protector \
	-fno-asynchronous-unwind-tables -fcf-protection=none -nostdlib -static -Wl,-T,"$dir/source/link.ld" \
	-Wl,--build-id=none -Wl,-z,max-page-size=4096 -o "$out" "$dir/source/boot.S" "$dir/source/main.c"
strip "$out"
