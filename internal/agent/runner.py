"""forkd's Python runner: evaluates code for the agent in one persistent __main__.

Descriptor 3 brings requests, 4 takes answers, each a header of u32 and a payload:

    request  payload size, operation, id, argument
    answer   payload size, id, status (1 is good), flags, sizes of four texts

The payload of an answer is its four texts. User code owns descriptors 0 to 2 and
the module __main__; nothing here is visible in it. The agent treats every answer
as hostile, so nothing here is a guard.

In a fork under emulation each piece of code that runs for the first time costs
time and memory, so what lies between a request and its answer is kept short and
prefers calls that were made before.
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
INFO, SETTLE, EVAL, RESEED = 1, 2, 3, 4
SYSTEM, ALL, SEED = 0, 1, 2  # arguments of RESEED; SEED repeats what the seed says
HAS, CUT = 1, 2  # flags of an answer
REQUEST = struct.Struct("<4I")
ANSWER = struct.Struct("<8I")
FILENAME = "<forkd>"
MAX_SOURCES = 2000
KEY = 624 * 4  # bytes of a Mersenne Twister
FILL = struct.Struct("%ds" % KEY)
FLAGS = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
CO_COROUTINE = 0x80
# What starts a line whose ';' do not all separate statements of the module.
COMPOUND = ("if", "for", "while", "with", "try", "def", "class", "async", "match", "@")
# What is tried as an expression in vain. It would only cost time.
STATEMENTS = ("import ", "from ", "del ", "pass", "raise", "assert ", "return", "global ", "nonlocal ", "yield")


def parts_of(code):
    """Cuts code before its last line or its last ';', if what follows may be an
    expression. Returns what is before and the rest with its place in the source kept,
    or None. Two parts that each compile on their own are the same program as the
    whole: neither a string, a bracket, a block nor a continued line spans the cut.
    That leaves ';' in a comment or behind a compound statement, which are excluded."""
    if "\r" in code or "\f" in code:
        return None
    body = code.rstrip(" \t\n")
    start = body.rfind("\n") + 1
    cut = body.rfind(";", start)
    if cut < 0:
        tail, pad, head = body[start:], "", body[:start]
        if start:
            pad = "\n" * body.count("\n")
    else:
        if start or "#" in body or body.startswith(COMPOUND):
            return None
        head, tail = body[:cut], body[cut + 1:].lstrip(" \t")
        if head.rstrip(" \t")[-1:] in ("", ";", "\\") or not body.isascii():
            return None
        # A form feed starts the indentation anew, so the columns stay right.
        pad = " " * (len(body) - len(tail) - 1) + "\f"
    if not tail or tail[0] in " \t)]}#@;\\" or tail.startswith(STATEMENTS):
        return None
    equal = tail.find("=")
    if equal > 0 and tail[equal + 1:equal + 2] != "=" and tail[equal - 1] not in "<>!" and tail.find("(", 0, equal) < 0:
        return None
    return head, pad + tail if pad else tail


class Runner:
    def __init__(self):
        self.pid = os.getpid()
        self.ns = sys.modules["__main__"].__dict__
        self.running = False
        self.count = 0
        self.name = None  # of the next source
        self.loop = None
        self.plan = None  # of a reseed
        self.numpy = None
        self.numpy_text = b""

    def on_interrupt(self, signum, frame):
        if self.running:
            self.running = False
            raise KeyboardInterrupt

    # evaluation

    def compile(self, code):
        """Returns the code objects to run and whether the last one is a value."""
        name = self.name or self.next_name()
        self.name = None
        linecache.cache[name] = (len(code), None, code.splitlines(True) if "\n" in code else [code], name)
        parts = parts_of(code)
        if parts is not None:
            head, tail = parts
            try:
                value = compile(tail, name, "eval", FLAGS, True)
                if not head:
                    return (value,), True
                return (compile(head, name, "exec", FLAGS, True), value), True
            except Exception:
                pass  # no expression, or an error that has to be told of the whole
        tree = compile(code, name, "exec", ast.PyCF_ONLY_AST | FLAGS, True)
        if not tree.body or not isinstance(tree.body[-1], ast.Expr):
            return (compile(code, name, "exec", FLAGS, True),), False
        last = ast.Expression(tree.body.pop().value)
        before = (compile(tree, name, "exec", FLAGS, True),) if tree.body else ()
        return (*before, compile(last, name, "eval", FLAGS, True)), True

    def next_name(self):
        self.count += 1
        if self.count > MAX_SOURCES:
            linecache.cache.pop("<eval-%d>" % (self.count - MAX_SOURCES), None)
        return "<eval-%d>" % self.count

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
        has, text, error, trace = False, "", b"", b""
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
            error, trace = clip(encode(error), 64 << 10), clip(encode(trace), 1 << 20)
            open_stdin()
        if os.getpid() != self.pid:  # user code forked and its child came here
            flush()
            os._exit(0)
        flush()
        data = encode(text)
        flags = HAS if has else 0
        if len(data) > limit:
            data = clip(data, limit)
            flags |= CUT
        numpy = sys.modules.get("numpy")
        if numpy is not self.numpy:
            self.numpy, self.numpy_text = numpy, version_of(numpy)
        send(ident, 1, flags, data, error, trace, self.numpy_text)

    # the fork contract

    def mix(self, mode, seed):
        """Reseeds every generator known here. It also runs once before a capture,
        so that what a library sets up at its first use is part of the snapshot.
        Returns what it did."""
        done = []
        mods = sys.modules
        number = int.from_bytes(seed, "little")
        if mode != SYSTEM:
            if "random" in mods:
                mods["random"].seed(number)
                done.append("random")
            if "numpy.random" in mods:
                # Both are the same Mersenne Twister: from the same seed they would
                # draw the same numbers.
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
        plan = self.plan
        if mode == ALL and plan is not None and plan.holds():
            done = plan.run()
        else:
            done = encode(" ".join(self.mix(mode, seed)))
            if mode != SYSTEM and plan is not None:
                plan.mixed()
        if env:
            for entry in env.split(b"\0"):
                key, sep, value = entry.partition(b"=")
                if sep:
                    os.environb[key] = value
                else:
                    os.environb.pop(key, None)
        send(ident, 1, 0, done)

    def settle(self, ident):
        """Readies for a capture: tries out what a fork will do, puts back what warm
        code had seeded, and takes what it left out of the collector's sight, since a
        later cycle would write to all of it and a fork would have to copy those pages."""
        kept = []
        for name, get, put in (("random", "getstate", "setstate"), ("numpy.random", "get_state", "set_state")):
            if name in sys.modules:
                kept.append((getattr(sys.modules[name], put), getattr(sys.modules[name], get)()))
        done = self.mix(ALL, os.urandom(64))
        plan = self.plan = make_plan(done)
        if plan is not None and plan.holds():
            plan.run()
        for put, state in kept:
            put(state)
        if plan is not None and plan.numpy is not None and not plan.numpy.get_state()[3]:
            plan.mixed()
        if self.name is None:
            self.name = self.next_name()
        gc.collect()
        gc.freeze()
        send(ident, 1, 0)

    def info(self, ident):
        send(ident, 1, 0, encode(sys.version.split()[0]))

    def handle(self, op, ident, arg, payload):
        try:
            if op == EVAL:
                self.answer_eval(ident, arg, payload.decode("utf-8", "surrogateescape"))
            elif op == RESEED:
                self.reseed(ident, arg, payload[:64], payload[64:])
            elif op == SETTLE:
                self.settle(ident)
            elif op == INFO:
                self.info(ident)
        except BaseException as e:
            if os.getpid() != self.pid:
                os._exit(0)
            send(ident, 0, 0, encode(describe(e)[0]))

    def serve(self):
        rest = b""
        while True:
            while len(rest) < 16:
                rest += receive()
            size, op, ident, arg = REQUEST.unpack_from(rest)
            size += 16
            if len(rest) < size:
                parts = [rest]
                have = len(rest)
                while have < size:
                    parts.append(receive(1 << 16))
                    have += len(parts[-1])
                rest = b"".join(parts)
            payload = rest[16:size]
            rest = rest[size:]
            self.handle(op, ident, arg, payload)


def open_stdin():
    """Input is always at its end; exit() closes it, which must not free descriptor 0."""
    if getattr(sys.stdin, "closed", True):
        sys.stdin = open(0, closefd=False)


class Plan:
    """A short way to do what Runner.mix does with ALL.

    It writes new keys over those of the global Mersenne Twisters in place: their own
    seed functions alone make an emulated guest translate a thousand pieces of code.
    Where the keys lie in memory is compared with what the generators tell, not assumed.
    What numpy keeps beside its key (a second Gaussian) is only known to be absent after
    a seed; so the plan holds until the key changes, and again after the next mix."""

    def __init__(self, done):
        """Raises if there is no such way here. Precondition: mix did what done says."""
        import ctypes
        self.mods = modules()
        self.told = encode(" ".join(done))
        self.inst = self.mods[0]._inst
        if sys.modules["_random"].Random.__basicsize__ < object.__basicsize__ + 4 + KEY:
            raise LookupError
        # struct: object header, int index, key.
        self.key = memory_at(ctypes, id(self.inst) + object.__basicsize__ + 4)
        version, state, _ = self.inst.getstate()
        if version != 3 or struct.pack("<624I", *state[:-1]) != bytes(self.key):
            raise LookupError
        self.numpy = self.mods[1]
        self.generator = self.key2 = self.kept = None
        if self.numpy is not None:
            self.generator = self.numpy.mtrand._rand._bit_generator
            self.key2 = memory_at(ctypes, self.generator.ctypes.state_address)
            state = self.numpy.get_state()
            if state[0] != "MT19937" or state[1].tobytes() != bytes(self.key2):
                raise LookupError

    def mixed(self):
        """Notes that nothing is beside numpy's key now."""
        if self.numpy is not None:
            self.kept = bytes(self.key2)

    def holds(self):
        if modules() != self.mods or self.mods[0]._inst is not self.inst or self.mods[2:4] != [None, None]:
            return False
        return self.numpy is None or (
            self.numpy.mtrand._rand._bit_generator is self.generator and bytes(self.key2) == self.kept)

    def run(self):
        """Precondition: it holds."""
        FILL.pack_into(self.key, 0, os.urandom(KEY))
        self.inst.gauss_next = None
        if self.numpy is not None:
            self.kept = os.urandom(KEY)
            FILL.pack_into(self.key2, 0, self.kept)
        if self.mods[4] is not None:
            self.mods[4]._name_sequence = None
        if self.mods[5] is not None:
            self.mods[5]._node = self.mods[5]._last_timestamp = None
        return self.told


def modules():
    get = sys.modules.get
    return [get("random"), get("numpy.random"), get("torch"), get("_ssl"), get("tempfile"), get("uuid")]


def make_plan(done):
    """Returns a plan or None."""
    try:
        plan = Plan(done)
        plan.mixed()
        return plan
    except Exception:
        return None


def memory_at(ctypes, address):
    return memoryview((ctypes.c_ubyte * KEY).from_address(address)).cast("B")


def version_of(module):
    try:
        return clip(encode(str(getattr(module, "__version__", ""))), 100)
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


def send(ident, status, flags, a=b"", b=b"", c=b"", d=b""):
    head = ANSWER.pack(len(a) + len(b) + len(c) + len(d), ident, status, flags, len(a), len(b), len(c), len(d))
    data = b"".join((head, a, b, c, d))
    n = os.write(ANS, data)
    while n < len(data):
        n += os.write(ANS, memoryview(data)[n:])


def receive(n=4096):
    data = os.read(REQ, n)
    if not data:
        os._exit(0)
    return data


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
    runner.serve()
