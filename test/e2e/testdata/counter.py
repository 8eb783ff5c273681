"""Counts, and answers on a port with its count and what it holds."""

import json
import os
import socket
import threading
import time
import zlib

blob = os.urandom(1 << 20) * 50
out = open("/root/open", "w")
out.write("unsynced " * 1000 + "\n")
out.flush()
server = socket.socket()
server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
server.bind(("127.0.0.1", 7001))
server.listen()
n = 0


def serve():
    while True:
        c, _ = server.accept()
        held = zlib.adler32(blob)
        c.sendall(json.dumps({"n": n, "blob": held, "pid": os.getpid(), "at": out.tell()}).encode())
        c.close()


threading.Thread(target=serve, daemon=True).start()
while True:
    n += 1
    out.write("%d\n" % n)
    out.flush()
    time.sleep(0.005)
