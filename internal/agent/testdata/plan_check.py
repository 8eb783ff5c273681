"""Checks that a plan gives the global generators new keys and leaves them working."""
import ctypes  # the plan needs it to be there
import random
import sys
import tempfile
import uuid

scope = {"__name__": "runner"}
exec(compile(open(sys.argv[1]).read(), "runner.py", "exec"), scope)

random.seed(1)
random.gauss(0, 1)  # leaves a second Gaussian behind
plan = scope["make_plan"](["random", "tempfile", "uuid"])
if plan is None or "numpy" in sys.modules:
    sys.exit("no plan for this python")
before = random.getstate()
seen = set()
for _ in range(50):
    assert plan.holds() and plan.run() == b"random tempfile uuid"
    version, state, second = random.getstate()
    assert second is None and version == 3 and state[-1] == before[1][-1], "more than the key changed"
    assert state[:-1] != before[1][:-1], "the key is the old one"
    drawn = tuple(random.getrandbits(32) for _ in range(700))
    assert len(set(drawn)) > 690 and drawn not in seen, "numbers repeat"
    seen.add(drawn)
    random.setstate(before)
assert uuid._node is None and tempfile._name_sequence is None

for name in "torch", "_ssl", "numpy.random":
    kept = sys.modules.pop(name, None)
    sys.modules[name] = ast = type(sys)(name)
    assert not plan.holds(), "it ignores " + name
    del sys.modules[name]
    if kept is not None:
        sys.modules[name] = kept
inst, random._inst = random._inst, random.Random()
assert not plan.holds(), "it ignores another generator"
random._inst = inst

try:
    import numpy.random
except ImportError:
    print("no numpy here")
    sys.exit()
plan = scope["make_plan"](["random", "numpy.random"])
if plan is None:
    sys.exit("no plan for this numpy")
numpy.random.seed(3)
assert not plan.holds(), "it ignores a seed, which may be followed by more"
plan.mixed()
assert plan.holds()
numbers = set()
for _ in range(50):
    plan.run()
    assert plan.holds()
    numbers.add(numpy.random.randint(1 << 31))
    assert not plan.holds(), "it ignores a draw"
    numpy.random.seed(3)
    plan.mixed()
assert len(numbers) == 50
