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
if plan is None:
    sys.exit("no plan for this python")
before = random.getstate()
seen = set()
for _ in range(50):
    assert plan() == b"random tempfile uuid"
    version, state, second = random.getstate()
    assert second is None and version == 3 and state[-1] == before[1][-1], "more than the key changed"
    assert state[:-1] != before[1][:-1], "the key is the old one"
    drawn = tuple(random.getrandbits(32) for _ in range(700))
    assert len(set(drawn)) > 690 and drawn not in seen, "numbers repeat"
    seen.add(drawn)
    random.setstate(before)
assert uuid._node is None and tempfile._name_sequence is None
assert scope["make_plan"](["torch", "random"]) is None
