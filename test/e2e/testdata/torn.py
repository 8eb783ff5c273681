"""Writes one growing number to two distant pages and to the disk, always in this order,
and before each round reads back what the round before wrote: whoever took memory and disk
apart in time makes it see an order that cannot have been."""

import mmap
import os
import struct

SIZE = 64 << 20
A, B, TORN = 0, SIZE // 8 - 1, SIZE // 16
ROUND = 8  # writes to memory between two to the disk

shared = os.open("/run/torn", os.O_RDWR | os.O_CREAT)
os.ftruncate(shared, SIZE)
words = memoryview(mmap.mmap(shared, SIZE)).cast("Q")
disk = os.open("/root/torn", os.O_RDWR | os.O_CREAT | os.O_DIRECT)
block, back = mmap.mmap(-1, 4096), mmap.mmap(-1, 4096)
os.pwrite(disk, block, 0)
n = 0
while not words[TORN]:
    if words[A] != n or words[B] != n:
        words[TORN] = 1
    if n % ROUND == 0:
        os.preadv(disk, [back], 0)
        if struct.unpack_from("Q", back)[0] != n:
            words[TORN] = 2
    n += 1
    words[A] = n
    words[B] = n
    if n % ROUND == 0:
        struct.pack_into("Q", block, 0, n)
        os.pwrite(disk, block, 0)
