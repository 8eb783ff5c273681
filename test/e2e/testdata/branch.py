"""Branches by the daemon at $FORKD_URL as a user of upstream's package does."""

import time
from importlib.metadata import version

from forkd import Controller
from forkd.controller import ControllerError


def fails(status, call, *args, **kwargs):
    try:
        call(*args, **kwargs)
    except ControllerError as e:
        assert e.status == status, (e.status, e.body, args, kwargs)
        assert e.body["error"], e.body
        return
    raise AssertionError(f"{call.__name__}{args}{kwargs} did not fail")


c = Controller()
source = c.spawn_sandboxes("py-base")[0]["id"]
c.eval_code(source, "x = 41")
made = []
for name, how in [
    ("live", {"mode": "live"}),
    ("diff", {"mode": "diff"}),
    ("full", {"mode": "full"}),
    ("old-diff", {"diff": True}),
    ("measured", {"measure_diff": True}),
    ("default", {}),
]:
    s = c.branch_sandbox(source, tag="sdk-" + name, **how)
    made.append(s["tag"])
    assert s["tag"] == "sdk-" + name and s["status"] == "ready" and s["bootable"], s
    assert s["branched_from"] == source and s["pause_ms"] > 0 and s["created_at_unix"] > 0 and s["dir"], s
    if "diff" in name or name == "measured":
        assert s["diff_ms"] > 0 and 0 < s["diff_physical_bytes"] < s["diff_logical_bytes"], s
    child = c.spawn_sandboxes(s["tag"])[0]["id"]
    assert c.eval_code(child, "x + 1")["result"] == "42", name
    c.kill_sandbox(child)

s = c.branch_sandbox(source, tag="sdk-later", mode="live", wait=False)
made.append(s["tag"])
assert s["status"] in ("writing", "ready"), s
deadline = time.monotonic() + 60
while True:
    now = [x for x in c.list_snapshots() if x["tag"] == "sdk-later"]
    assert len(now) == 1 and now[0]["status"] in ("writing", "ready"), now
    if now[0]["status"] == "ready":
        break
    assert time.monotonic() < deadline, now
    time.sleep(0.05)
child = c.spawn_sandboxes("sdk-later")[0]["id"]
assert c.eval_code(child, "x")["result"] == "41"
auto = c.branch_sandbox(source)
assert auto["tag"].startswith("branch-"), auto
made.append(auto["tag"])
assert c.get_sandbox(source)["branch_count"] == len(made) and c.get_sandbox(source)["has_branched"]

fails(409, c.branch_sandbox, source, tag="sdk-live")
fails(400, c.branch_sandbox, source, tag="../x")
fails(400, c.branch_sandbox, source, mode="torn")
fails(400, c.branch_sandbox, source, diff=True, measure_diff=True)
fails(400, c.branch_sandbox, source, mode="full", wait=False)
fails(400, c.branch_sandbox, source, diff=True, wait=False)
fails(404, c.branch_sandbox, "sb00000000000000000000")
fails(409, c.delete_snapshot, "sdk-live")  # others depend on it
fails(409, c.delete_snapshot, "sdk-later")  # a sandbox uses it
fails(404, c.delete_snapshot, "no-such-tag")

assert c.eval_code(source, "x")["result"] == "41"
c.kill_sandbox(child)
c.kill_sandbox(source)
for tag in reversed(made):
    c.delete_snapshot(tag)
assert not [x for x in c.list_snapshots() if x["tag"] in made]
print("forkd", version("forkd"), "branches")
