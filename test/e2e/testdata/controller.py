"""Uses the forkd daemon at $FORKD_URL as a user of upstream's package does."""

from importlib.metadata import version

from forkd import Controller
from forkd.controller import ControllerError


def fails(status, call, *args, **kwargs):
    try:
        call(*args, **kwargs)
    except ControllerError as e:
        assert e.status == status, (e.status, e.body, args)
        assert e.body["error"], e.body
        return
    raise AssertionError(f"{call.__name__}{args} did not fail")


c = Controller()
snapshots = c.list_snapshots()
assert [s for s in snapshots if s["tag"] == "py-base" and s["status"] == "ready" and s["bootable"]], snapshots

made = c.spawn_sandboxes("py-base", n=5)
ids = [s["id"] for s in made]
assert len(set(ids)) == 5, made
for s in made:
    assert s["snapshot_tag"] == "py-base" and s["pid"] > 0 and s["created_at_unix"] > 0, s
    assert {"netns", "guest_addr", "memory_limit_mib"} <= s.keys(), s
assert set(ids) <= {s["id"] for s in c.list_sandboxes()}
assert c.get_sandbox(ids[0])["id"] == ids[0]

pong = c.ping_sandbox(ids[0])
assert pong["pong"] is True and pong["pid"] == 1, pong

out = c.exec_command(ids[1], ["sh", "-c", "echo out; echo err >&2; exit 3"])
assert (out["stdout"], out["stderr"], out["exit_code"]) == ("out\n", "err\n", 3), out
out = c.exec_command(ids[1], ["sleep", "100"], timeout_secs=1)
assert out["exit_code"] != 0, out

value = c.eval_code(ids[2], "import numpy; int(numpy.arange(4).sum())")
assert value["result"] == "6" and value["error"] is None, value
value = c.eval_code(ids[2], "1/0")
assert value["result"] is None and "ZeroDivisionError" in value["error"], value

more = c.spawn_sandboxes("py-base", n=1, per_child_netns=True, memory_limit_mib=700, prewarm=True)
assert more[0]["memory_limit_mib"] == 700, more

fails(400, c.spawn_sandboxes, "py-base", n=0)
fails(400, c.spawn_sandboxes, "py-base", n=1001)
fails(400, c.spawn_sandboxes, "../../etc")
fails(400, c.spawn_sandboxes, "py-base", live_fork=True)
fails(404, c.spawn_sandboxes, "no-such-tag")
fails(404, c.get_sandbox, "sb00000000000000000000")
fails(404, c.kill_sandbox, "sb00000000000000000000")
fails(404, c.eval_code, "sb00000000000000000000", "1")
fails(404, c.ping_sandbox, "sb00000000000000000000")
fails(400, c.exec_command, ids[0], [])
fails(404, c.delete_snapshot, "no-such-tag")

for sandbox in ids + [more[0]["id"]]:
    c.kill_sandbox(sandbox)
fails(404, c.kill_sandbox, ids[0])
assert not {s["id"] for s in c.list_sandboxes()} & set(ids)
print("forkd", version("forkd"), "works")
