"""Attacks that take more than their share. Each is bounded, so that it can win in a place without walls."""

from attacks.attack import Attack, Place, Stakes, attack, python
from openforge.sandbox.contract import SandboxLimits

TIGHT = SandboxLimits(memory_mb=112, pids=64, disk_mb=16)

FORKS = """
import os, signal, sys, time
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
children = []
try:
    while len(children) < 300:
        child = os.fork()
        if child == 0:
            time.sleep(20)
            os._exit(0)
        children.append(child)
    print("WON", len(children), "processes")
except OSError as error:
    print(len(children), error, file=sys.stderr)
for child in children:
    os.kill(child, 9)
"""


@attack("fork-bomb")
async def fork_bomb(place: Place, stakes: Stakes) -> str:
    return await python(place, FORKS)


MEMORY = """
held = []
for n in range(30):
    held.append(bytearray(b"x") * (10 << 20))
print("WON 300 MB")
"""


@attack("memory-bomb")
async def memory_bomb(place: Place, stakes: Stakes) -> str:
    return await python(place, MEMORY)


CROWD = """
import os, sys, time
open('/proc/self/oom_score_adj', 'w').write('0')
children = []
for n in range(40):
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        held = bytearray(b"x") * (8 << 20)
        os.write(write, b"x")
        time.sleep(20)
        os._exit(0)
    os.close(write)
    children.append((child, read))
for _, read in children:
    os.read(read, 1)
there = sum(os.waitpid(child, os.WNOHANG)[0] == 0 for child, _ in children)
for child, _ in children:
    os.kill(child, 9)
print("WON" if there == 40 else "only", there, "processes of 8 MB", file=sys.stdout if there == 40 else sys.stderr)
"""


@attack("memory-bomb-of-many")
async def memory_bomb_of_many(place: Place, stakes: Stakes) -> str:
    return await python(place, CROWD)


DISK = """
import os, sys
block = b"x" * (1 << 20)
for folder in sys.argv[1:]:
    written = 0
    try:
        with open(folder + "/fill", "wb", buffering=0) as file:
            while written < 48 and file.write(block) == len(block):
                written += 1
    except OSError as error:
        print(folder, written, error, file=sys.stderr)
    if os.path.exists(folder + "/fill"):
        os.unlink(folder + "/fill")
    if written >= 48:
        print("WON", folder, written, "MB")
"""


@attack("disk-bomb")
async def disk_bomb(place: Place, stakes: Stakes) -> str:
    return await python(place, DISK, *place.targets["folders"])


KEPT = """
import os, sys
os.mkdir(sys.argv[1])
try:
    for n in range(150_000):
        os.mknod(f"{sys.argv[1]}/{n}")
    print("WON", n + 1, "files")
except OSError as error:
    print(n, error, file=sys.stderr)
"""
INODES = f"{KEPT}\nimport shutil; shutil.rmtree(sys.argv[1])"


@attack("file-bomb", limits=TIGHT)
async def file_bomb(place: Place, stakes: Stakes) -> str:
    """Empty files take no room in a folder of memory, and memory all the same."""
    top = str(stakes.memory) if place.name == "unguarded" else "/tmp"
    return await python(place, INODES, f"{top}/many", timeout_s=60)


@attack("memory-full-of-files", limits=TIGHT)
async def memory_full_of_files(place: Place, stakes: Stakes) -> str:
    """Memory that no process holds: whoever is killed for it frees nothing, until only the first process is left."""
    top = str(stakes.memory) if place.name == "unguarded" else "/tmp"
    rounds = 1 if place.name == "unguarded" else 3
    won = [await python(place, KEPT, f"{top}/{n}", timeout_s=60) for n in range(rounds)]
    return "; ".join(filter(None, won))


FLOOD = "import os\nfor n in range(50):\n    os.write(1, b'x' * (1 << 20))"
LINE = "import os, time\nfor n in range(30):\n    os.write(2, b'x' * (1 << 20))\nos.write(2, b'end')"


@attack("output-flood", guard="owner")
async def output_flood(place: Place, stakes: Stakes) -> str:
    result = await place.run(["/usr/bin/python3", "-c", FLOOD])
    return f"{len(result.stdout)} bytes were kept" if len(result.stdout) > 1 << 20 else ""


@attack("endless-line-of-errors", guard="owner")
async def endless_line(place: Place, stakes: Stakes) -> str:
    result = await place.run(["/usr/bin/python3", "-c", LINE])
    return f"{len(result.stderr)} bytes were kept" if len(result.stderr) > 1 << 20 else ""


ATTACKS: tuple[Attack, ...] = (
    fork_bomb,
    memory_bomb,
    memory_bomb_of_many,
    disk_bomb,
    file_bomb,
    memory_full_of_files,
    output_flood,
    endless_line,
)
