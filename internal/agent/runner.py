"""forkd's Python runner: evaluates code for the agent in one persistent __main__.

Descriptor 3 brings requests, 4 takes answers: u32 length, then fields of u32
length and bytes. A request is (op, id, ...), an answer (id, status, ...). User
code owns descriptors 0 to 2 and the module __main__; nothing here is visible in
it. The agent treats every answer as hostile, so nothing here is a guard.
"""
import ast
import builtins
import gc
import linecache
import os
import signal
import struct
import sys
import traceback

REQ, ANS = 3, 4
FILENAME = "<forkd>"
MAX_SOURCES = 2000
FLAGS = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
CO_COROUTINE = 0x80


class Runner:
    def __init__(self):
        self.pid = os.getpid()
        self.ns = sys.modules["__main__"].__dict__
        self.running = False
        self.count = 0
        self.loop = None
        self.twister = None  # see find_twister; lost with the first eval after it
        self.keep = None

    def on_interrupt(self, signum, frame):
        if self.running:
            self.running = False
            raise KeyboardInterrupt

    # evaluation

    def compile(self, code):
        """Returns the code objects to run and whether the last one is a value."""
        self.count += 1
        name = "<eval-%d>" % self.count
        lines = code.splitlines(True)
        linecache.cache[name] = (len(code), None, lines, name)
        linecache.cache.pop("<eval-%d>" % (self.count - MAX_SOURCES), None)
        tree = compile(code, name, "exec", ast.PyCF_ONLY_AST | FLAGS, True)
        last = None
        if tree.body and isinstance(tree.body[-1], ast.Expr):
            last = ast.Expression(tree.body.pop().value)
        parts = []
        if tree.body:
            parts.append(compile(tree, name, "exec", FLAGS, True))
        if last is not None:
            parts.append(compile(last, name, "eval", FLAGS, True))
        return parts, last is not None

    def run(self, part):
        if not part.co_flags & CO_COROUTINE:
            return eval(part, self.ns)
        import asyncio
        import types
        if self.loop is None or self.loop.is_closed():
            self.loop = asyncio.new_event_loop()
            asyncio.set_event_loop(self.loop)
        make = types.FunctionType(part, self.ns)
        task = self.loop.create_task(make())
        try:
            return self.loop.run_until_complete(task)
        except BaseException:
            if not task.done():
                task.cancel()
                try:
                    self.loop.run_until_complete(task)
                except BaseException:
                    pass
            raise

    def evaluate(self, code):
        """Returns (has value, its repr)."""
        parts, valued = self.compile(code)
        value = None
        for part in parts:
            value = self.run(part)
        if not valued or value is None:
            return False, ""
        text = repr(value)
        self.ns["_"] = value
        return True, text

    def answer_eval(self, ident, limit, code):
        has, text, error, trace = False, "", "", ""
        open_stdin()
        self.twister = self.keep = None
        try:
            self.running = True
            try:
                has, text = self.evaluate(code)
            finally:
                self.running = False
        except BaseException as e:
            self.running = False
            has, text = False, ""
            error, trace = describe(e)
        if os.getpid() != self.pid:  # user code forked and its child came here
            flush()
            os._exit(0)
        flush()
        data = encode(text)
        cut = len(data) > limit
        if cut:
            data = clip(data, limit)
        send(ident, b"ok", b"1" if has else b"0", data, b"1" if cut else b"0",
             clip(encode(error), 64 << 10), clip(encode(trace), 1 << 20), numpy_version())

    # the fork contract

    def mix(self, mode, seed):
        """Reseeds every generator known here. It also runs once before a capture,
        so that what a library sets up at its first use is part of the snapshot."""
        done = []
        mods = sys.modules
        number = int.from_bytes(seed, "little")
        if mode == b"all":
            if "random" in mods:
                mods["random"].seed(number)
                done.append("random")
            if "numpy.random" in mods:
                if self.twister is not None:
                    self.twister[:] = os.urandom(len(self.twister))
                else:
                    # Both are the same Mersenne Twister: from the same seed they
                    # would draw the same numbers.
                    mods["numpy.random"].seed(
                        [int.from_bytes(seed[i:i + 4], "big") for i in range(0, len(seed), 4)])
                done.append("numpy.random")
            if "torch" in mods and hasattr(mods["torch"], "manual_seed"):
                mods["torch"].manual_seed(number & (2 ** 63 - 1))
                done.append("torch")
        if "tempfile" in mods:
            mods["tempfile"]._name_sequence = None
            done.append("tempfile")
        if "uuid" in mods:
            mods["uuid"]._node = None
            mods["uuid"]._last_timestamp = None
            done.append("uuid")
        if "_ssl" in mods:
            mods["_ssl"].RAND_add(seed, float(len(seed)))
            done.append("ssl")
        return done

    def reseed(self, ident, mode, seed, env):
        done = self.mix(mode, seed)
        for entry in env:
            key, sep, value = entry.partition(b"=")
            if sep:
                os.environb[key] = value
            else:
                os.environb.pop(key, None)
        send(ident, b"ok", encode(" ".join(done)))

    def rehearse(self):
        """Mixes once and puts back what warm code had seeded."""
        kept = []
        for name, get, put in (("random", "getstate", "setstate"), ("numpy.random", "get_state", "set_state")):
            if name in sys.modules:
                kept.append((getattr(sys.modules[name], put), getattr(sys.modules[name], get)()))
        self.mix(b"all", os.urandom(64))
        self.twister, self.keep = find_twister()
        for put, state in kept:
            put(state)
        # A second Gaussian that warm code left behind is not part of the key.
        if self.twister is not None and sys.modules["numpy.random"].get_state()[3]:
            self.twister = self.keep = None

    def settle(self, ident):
        """Takes what warm code left out of the collector's sight: a later cycle
        would write to all of it, and a fork would have to copy those pages."""
        self.rehearse()
        gc.collect()
        gc.freeze()
        send(ident, b"ok")

    def info(self, ident):
        send(ident, b"ok", encode(sys.version.split()[0]))

    def handle(self, fields):
        op, ident = fields[0], fields[1]
        try:
            if op == b"eval":
                self.answer_eval(ident, int(fields[2]), fields[3].decode("utf-8", "surrogateescape"))
            elif op == b"reseed":
                self.reseed(ident, fields[2], fields[3], fields[4:])
            elif op == b"settle":
                self.settle(ident)
            elif op == b"info":
                self.info(ident)
        except BaseException as e:
            if os.getpid() != self.pid:
                os._exit(0)
            send(ident, b"error", encode(describe(e)[0]))


def open_stdin():
    """Input is always at its end; exit() closes it, which must not free descriptor 0."""
    if getattr(sys.stdin, "closed", True):
        sys.stdin = open(0, closefd=False)


def find_twister():
    """The key of numpy's global Mersenne Twister as writable memory, and who owns it.

    numpy's own seed() converts its argument to an array first, which alone makes
    an emulated guest translate a thousand pieces of code. The generator has just
    been seeded by it, so its key is used up and it keeps no second Gaussian. That
    the memory is the key is tried out, not assumed."""
    random = sys.modules.get("numpy.random")
    ctypes = sys.modules.get("ctypes")
    if random is None or ctypes is None:
        return None, None
    try:
        generator = random.mtrand._rand._bit_generator
        size = 624 * 4
        memory = memoryview((ctypes.c_ubyte * size).from_address(generator.ctypes.state_address)).cast("B")
        state = random.get_state()
        memory[:] = os.urandom(size)
        if random.get_state()[1].tobytes() == bytes(memory) and state[0] == "MT19937" and state[2] == 624 and not state[3]:
            return memory, generator
        random.set_state(state)
    except Exception:
        pass
    return None, None


def numpy_version():
    numpy = sys.modules.get("numpy")
    try:
        return clip(encode(str(getattr(numpy, "__version__", ""))), 100)
    except BaseException:
        return b""


def describe(e):
    """Error line and traceback of e without the runner's own frames."""
    try:
        tb = e.__traceback__
        while tb is not None and tb.tb_frame.f_code.co_filename == FILENAME:
            tb = tb.tb_next
        trace = "".join(traceback.format_exception(type(e), e, tb))
        line = traceback.format_exception_only(type(e), e)
        error = (line[-1] if not isinstance(e, SyntaxError) else "%s: %s" % (type(e).__name__, e)).strip()
        return error, trace
    except BaseException:
        return type(e).__name__, ""


def flush():
    for f in (sys.stdout, sys.stderr):
        try:
            f.flush()
        except BaseException:
            pass


def encode(text):
    return text.encode("utf-8", "backslashreplace")


def clip(data, limit):
    """The first limit bytes, not ending inside a character."""
    if len(data) <= limit:
        return data
    while limit > 0 and data[limit] & 0xC0 == 0x80:
        limit -= 1
    return data[:limit]


def send(*fields):
    body = b"".join(struct.pack("<I", len(f)) + f for f in fields)
    body = memoryview(struct.pack("<I", len(body)) + body)
    while body:
        body = body[os.write(ANS, body):]


def receive(n):
    parts = []
    while n:
        part = os.read(REQ, min(n, 1 << 20))
        if not part:
            os._exit(0)
        parts.append(part)
        n -= len(part)
    return b"".join(parts)


def split(body):
    fields, at = [], 0
    while at < len(body):
        (n,) = struct.unpack_from("<I", body, at)
        fields.append(body[at + 4:at + 4 + n])
        at += 4 + n
    return fields


def main():
    for fd in (REQ, ANS):
        os.set_inheritable(fd, False)
    sys.stdout.reconfigure(errors="surrogateescape", line_buffering=True)
    sys.argv = [""]
    sys.stdin = open(0, closefd=False)
    ns = sys.modules["__main__"].__dict__
    for name in [k for k in ns if not k.startswith("__")]:
        del ns[name]
    ns["__builtins__"] = builtins
    runner = Runner()
    signal.signal(signal.SIGINT, runner.on_interrupt)
    while True:
        (n,) = struct.unpack("<I", receive(4))
        runner.handle(split(receive(n)))
