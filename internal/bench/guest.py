# What user code does, each kind of work for itself. It prints one line of JSON:
# {"ms": {name: best of the rounds}, "check": {name: what must be equal everywhere}, ...}.
#
# Natively it runs by chroot without any mounts, so the null device (3) and a directory
# on a tmpfs (4) come as descriptors; in a sandbox it finds its own.
import json, mmap, os, subprocess, sys, time
import numpy

rounds, native = int(sys.argv[1]), sys.argv[2] == "native"


def tmpfs():
    if native:
        return 4, "tmpfs"
    kinds = {}
    with open("/proc/mounts") as f:
        for line in f:
            fields = line.split()
            kinds[fields[1]] = fields[2]
    for path in ("/dev/shm", "/run", "/tmp"):
        if kinds.get(path) == "tmpfs" and os.access(path, os.W_OK):
            return os.open(path, os.O_RDONLY), "tmpfs"
    return os.open("/tmp", os.O_RDONLY), kinds.get("/tmp", kinds.get("/", "unknown"))


null = 3 if native else os.open("/dev/null", os.O_WRONLY)
where, kind = tmpfs()


def fib(n):
    return n if n < 2 else fib(n - 1) + fib(n - 2)


def cpu_fib():
    return fib(24)


numbers = numpy.arange(90000, dtype=numpy.float64).reshape(300, 300) / 90000


def numpy_matmul():
    b = numbers
    for _ in range(5):
        b = numbers @ b
        b /= b.max()
    return round(float(b.sum()), 3)


doc = {"k%d" % i: [i, str(i), {"x": i * 1.5}] for i in range(50)}


def json_loop():
    n = 0
    for _ in range(500):
        n += len(json.dumps(json.loads(json.dumps(doc))))
    return n


def syscall_write():
    for _ in range(50000):
        os.write(null, b"x")
    return 50000


def files():
    n = 0
    for i in range(2000):
        name = "forkd-bench-%d" % i
        fd = os.open(name, os.O_CREAT | os.O_WRONLY, 0o600, dir_fd=where)
        os.write(fd, b"x")
        os.close(fd)
        n += os.stat(name, dir_fd=where).st_size
        os.unlink(name, dir_fd=where)
    return n


def subprocess_true():
    return sum(subprocess.run(["true"]).returncode for _ in range(20))


def memory_touch():
    m = mmap.mmap(-1, 100 << 20)
    for off in range(0, 100 << 20, mmap.PAGESIZE):
        m[off] = 1
    m.close()
    return 100 << 20


def import_numpy():
    out = subprocess.run([sys.executable, "-c", "import numpy; print(numpy.__version__)"], stdout=subprocess.PIPE, check=True)
    return out.stdout.decode().strip()


works = [cpu_fib, numpy_matmul, json_loop, syscall_write, files, subprocess_true, memory_touch, import_numpy]
best, check, begun = {}, {}, time.perf_counter()
for work in works:
    for _ in range(rounds):
        start = time.perf_counter()
        check[work.__name__] = work()
        took = (time.perf_counter() - start) * 1000
        best[work.__name__] = min(took, best.get(work.__name__, took))
total = (time.perf_counter() - begun) * 1000
print(json.dumps({"ms": best, "total_ms": total, "check": check, "files_on": kind, "python": sys.version.split()[0], "numpy": numpy.__version__}))
