"""Compares Runner.compile with a compilation by the syntax tree, for sources made
of all pairs and triples of fragments."""
import ast
import itertools
import sys

scope = {"__name__": "runner"}
exec(compile(open(sys.argv[1]).read(), "runner.py", "exec"), scope)
FLAGS = scope["FLAGS"]

FRAGMENTS = [
    "a", "1", "x = 5", "a == b", "(a, b)", "f(a=1)", "x = f(1)", "*a, b", "yield a", "lambda: a",
    "'s;t'", "'a\\nb'", "'''q", "q'''", "(", ")", "[a,", "a]", "\\", "# c", "a # c; b", "", " ", "\t", ";", ":",
    "if a: b", "if a:", "else: b", "for i in a: b", "while 0: a", "with a: b", "try: a", "except: b", "finally: b",
    "def g(): a", "class K: a", "async def h(): a", "@a", "import sys", "from sys import path", "del a", "pass",
    "return a", "raise a", "assert a", "global a", "await a", "match a:", " case b: a", "x: int = 3", "a if b else c",
    "ifa", "forx", "f'{a;b}'", "f'{a}'", "{1: 2}", "{a}", "a[1:2]", "~a", "not a", "-a", "...", "\u00e9", "'\u00e9'",
    "print(a)", "x += 1", "(x := 1)", "x := 1", "\x0c", "\r", "\x00", "a\\", "a <= b", "a != b", "__debug__",
]
JOINS = [";", "; ", "\n", "\n    ", " "]


def reference(code, name):
    """What the runner promises: a last expression statement is the value."""
    tree = compile(code, name, "exec", ast.PyCF_ONLY_AST | FLAGS, True)
    last = None
    if tree.body and isinstance(tree.body[-1], ast.Expr):
        last = ast.Expression(tree.body.pop().value)
    parts = [compile(tree, name, "exec", FLAGS, True)] if tree.body else []
    if last is not None:
        parts.append(compile(last, name, "eval", FLAGS, True))
    return parts, last is not None


def told(make):
    """Describes what make returned or raised, down to each instruction's place."""
    try:
        parts, valued = make()
    except Exception as e:
        where = (e.lineno, e.offset, e.text) if isinstance(e, SyntaxError) else None
        return type(e).__name__, str(e), where
    flat = []
    for part in parts:
        flatten(part, flat)
    return valued, [c for c in flat if c[0] or c[1]]


def flatten(code, out):
    """Appends what code does, without what only tells how it was cut."""
    instructions = code.co_code
    consts = [c for c in code.co_consts if not hasattr(c, "co_code")]
    places = list(code.co_positions()) if hasattr(code, "co_positions") else None
    empty = not code.co_names and not code.co_varnames and len(instructions) <= 8 and consts == [None]
    if not empty:
        out.append((instructions, code.co_names, repr(consts), code.co_flags, places))
    for c in code.co_consts:
        if hasattr(c, "co_code"):
            flatten(c, out)


def check(code):
    runner = scope["Runner"]()
    runner.name = "<eval-1>"
    got, want = told(lambda: runner.compile(code)), told(lambda: reference(code, "<eval-1>"))
    if got != want:
        print("source %r\n got %r\nwant %r" % (code, got, want))
        return 1
    return 0


def main():
    bad = count = fast = 0
    sources = list(FRAGMENTS)
    for a, b in itertools.product(FRAGMENTS, repeat=2):
        sources += [a + j + b for j in JOINS]
    step = 0
    for a, b, c in itertools.product(FRAGMENTS, repeat=3):
        step += 1
        if step % 41 == 0:  # a sample; all of them would take minutes
            sources.append(a + JOINS[step % 5] + b + JOINS[step // 41 % 5] + c)
    for code in sources:
        count += 1
        fast += scope["parts_of"](code) is not None
        bad += check(code)
        if bad > 20:
            break
    print("%d sources, %d tried as parts, %d differ" % (count, fast, bad))
    sys.exit(bad != 0)


main()
