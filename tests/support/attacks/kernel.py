"""Attacks on what the kernel keeps apart: namespaces, users, other processes, calls that no agent needs."""

from attacks.attack import Attack, Place, Stakes, attack, python, shell

MOUNT = """
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
os.makedirs("m", exist_ok=True)
for source, kind, flags in ((b"none", b"tmpfs", 0), (b"/", b"", 4096), (b"none", b"proc", 0), (b"none", b"sysfs", 0)):
    if libc.mount(source, b"m", kind, flags, None) == 0:
        print("WON mount", kind)
        libc.umount2(b"m", 2)
    print(os.strerror(ctypes.get_errno()), file=sys.stderr)
if libc.syscall(430, b"tmpfs", 0) >= 0:
    print("WON fsopen")
for place in (b"/proc", b"/workspace", b"/etc/resolv.conf"):
    if sys.argv[1:] and libc.umount2(place, 2) == 0:
        print("WON umount", place)
"""


@attack("mounts")
async def mounts(place: Place, stakes: Stakes) -> str:
    return await python(place, MOUNT, *(["everything"] if place.name != "unguarded" else []))


NAMESPACES = """
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
for flag in (0x10000000, 0x10020000, 0x00020000, 0x40000000, 0x20000000):
    child = os.fork()
    if child == 0:
        os._exit(0 if libc.unshare(flag) == 0 else ctypes.get_errno())
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    print("WON unshare" if code == 0 else os.strerror(code), file=sys.stdout if code == 0 else sys.stderr)
child = libc.syscall(56, 0x10000000 | 17, 0, 0, 0, 0)
if child == 0:
    os._exit(0)
if child > 0:
    os.waitpid(child, 0)
    print("WON clone")
"""


@attack("own-namespaces")
async def own_namespaces(place: Place, stakes: Stakes) -> str:
    return await python(place, NAMESPACES)


JOIN = """
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
for kind in ("uts", "ipc", "net", "mnt", "pid", "cgroup", "user"):
    for who in (os.getppid(), 1):
        try:
            fd = os.open(f"/proc/{who}/ns/{kind}", os.O_RDONLY)
        except OSError as error:
            print(error, file=sys.stderr)
            continue
        if libc.setns(fd, 0) == 0:
            print("WON", kind)
        print(os.strerror(ctypes.get_errno()), file=sys.stderr)
"""


@attack("namespaces-of-others")
async def namespaces_of_others(place: Place, stakes: Stakes) -> str:
    return await python(place, JOIN)


SETUID = """
import os, subprocess, sys
if sys.argv[2]:
    os.setgroups([]); os.setgid(int(sys.argv[2])); os.setuid(int(sys.argv[2]))
for become in (os.setuid, os.setgid, lambda zero: os.setgroups([0])):
    try:
        become(0)
        print("WON", become)
    except OSError as error:
        print(error, file=sys.stderr)
told = subprocess.run([sys.argv[1] + "/id", "-u"], capture_output=True, text=True)
if told.stdout == "0\\n":
    print("WON root by a program")
print("id -u:", told.stdout, told.stderr, file=sys.stderr)
"""


@attack("setuid-programs", binds={"/opt/setuid": "setuid"})
async def setuid_programs(place: Place, stakes: Stakes) -> str:
    """A program of root's that makes whoever starts it root lies within reach."""
    (user,) = place.targets["user"]
    return await python(place, SETUID, "/opt/setuid" if not user else str(stakes.folder / "setuid"), user)


TRACE = """
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
def tried(what, result):
    if result >= 0:
        print("WON", what)
    print(what, os.strerror(ctypes.get_errno()), file=sys.stderr)
tried("ptrace", libc.ptrace(16, 1, 0, 0))
libc.ptrace(17, 1, 0, 0)
here, there = (ctypes.c_size_t * 2)(), (ctypes.c_size_t * 2)(1 << 22, 16)
held = ctypes.create_string_buffer(16)
here[0], here[1] = ctypes.addressof(held), 16
tried("process_vm_readv", libc.syscall(310, 1, here, 1, there, 1, 0) - 1)
tried("pidfd_getfd", libc.syscall(438, libc.syscall(434, 1, 0), 3, 0))
for name in ("mem", "maps", "environ", "fd/3", "fd/0", "auxv", "stack", "syscall"):
    try:
        os.read(os.open(f"/proc/1/{name}", os.O_RDONLY), 1)
        print("WON", name)
    except OSError as error:
        print(error, file=sys.stderr)
"""


@attack("tracing-the-first-process")
async def tracing_the_first_process(place: Place, stakes: Stakes) -> str:
    return await python(place, TRACE)


@attack("signals-to-the-first-process", guard="owner")
async def signals_to_the_first_process(place: Place, stakes: Stakes) -> str:
    signals = "for s in TERM INT QUIT HUP USR1 USR2 CHLD PIPE ABRT SEGV STOP KILL; do kill -$s 1; done; kill -9 -1"
    await shell(place, signals)
    return "" if await place.alive() else "its place is gone"


KEYRING = """
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
name, secret = sys.argv[1].encode(), sys.argv[2].encode()
if secret:
    for ring in (-4, -3, -5):
        key = libc.syscall(248, b"user", name, secret, len(secret), ring)
        print(key, os.strerror(ctypes.get_errno()), file=sys.stderr)
        if key >= 0:
            libc.syscall(250, 5, key, 0x3F3F3F3F)
else:
    for ring in (-4, -3, -5):
        key = libc.syscall(250, 10, ring, b"user", name, 0)
        held = ctypes.create_string_buffer(100)
        if key >= 0 and libc.syscall(250, 11, key, held, 100) > 0:
            print("WON", held.value.decode())
            libc.syscall(250, 9, key, ring)
        print(os.strerror(ctypes.get_errno()), file=sys.stderr)
"""


@attack("kernel-keyrings")
async def kernel_keyrings(place: Place, stakes: Stakes) -> str:
    """Two agents of one user number share that user's keys, where they may use any."""
    beside = await place.neighbour()
    await python(beside, KEYRING, stakes.abstract, stakes.secret)
    return await python(place, KEYRING, stakes.abstract, "")


SHARED_MEMORY = """
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
libc.shmat.restype = ctypes.c_void_p
secret = sys.argv[1].encode()
segment = libc.shmget(0x0F0F0F0F, 4096, 0o1666 if secret else 0)
if segment < 0:
    raise SystemExit(os.strerror(ctypes.get_errno()))
place = libc.shmat(segment, None, 0)
if secret:
    ctypes.memmove(place, secret, len(secret))
else:
    print("WON", ctypes.string_at(place, 40).decode())
    libc.shmctl(segment, 0, None)
"""


@attack("shared-memory")
async def shared_memory(place: Place, stakes: Stakes) -> str:
    beside = await place.neighbour()
    await python(beside, SHARED_MEMORY, stakes.secret)
    return await python(place, SHARED_MEMORY, "")


@attack("files-of-a-neighbour")
async def files_of_a_neighbour(place: Place, stakes: Stakes) -> str:
    beside = await place.neighbour()
    name = f"left-{stakes.abstract}"
    folders = "/tmp /dev/shm /var/tmp /run"
    await shell(beside, f"for f in {folders}; do echo {stakes.secret} > $f/{name}; done; true")
    found = await shell(place, f"for f in {folders}; do cat $f/{name} && echo WON $f; done")
    if place.name == "unguarded":
        await shell(place, f"for f in {folders}; do rm -f $f/{name}; done")
    return found


@attack("processes-of-a-neighbour")
async def processes_of_a_neighbour(place: Place, stakes: Stakes) -> str:
    beside = await place.neighbour()
    await shell(beside, "sleep 7171 >/dev/null 2>&1 & sleep 0.2")
    kill = "for p in /proc/[0-9]*; do tr '\\0' ' ' < $p/cmdline | grep -q 'sleep 717[1]' && kill -9 ${p#/proc/}; done"
    await shell(place, f"{kill}; true" if place.name == "unguarded" else f"{kill}; kill -9 -1")
    left = await shell(beside, "cat /proc/[0-9]*/cmdline | tr '\\0' ' ' | grep -q 'sleep 717[1]' || echo WON")
    return f"{left} it was killed" if left else ""


CALLS = """
import ctypes, os, struct, sys
libc = ctypes.CDLL(None, use_errno=True)
perf = ctypes.create_string_buffer(struct.pack("IIQ", 1, 128, 0) + bytes(112))
bpf = ctypes.create_string_buffer(struct.pack("IIII", 2, 4, 4, 1) + bytes(112))
calls = {
    "perf_event_open": (298, perf, 0, -1, -1, 0), "bpf": (321, 0, bpf, 128), "io_uring_setup": (425, 8, bytes(120)),
    "userfaultfd": (323, 0), "fanotify_init": (300, 0, 0), "syslog": (103, 10, 0, 0), "swapoff": (168, b"/none"),
    "kexec_load": (246, 0, 0, 0, 0), "init_module": (175, 0, 0, b""), "quotactl": (179, 0, 0, 0, 0), "acct": (163, 0),
    "clone3": (435, bytes(64), 64),
}
for name, call in calls.items():
    result = libc.syscall(*(ctypes.create_string_buffer(part) if isinstance(part, bytes) else part for part in call))
    refused = ctypes.get_errno() in (1, 38)
    if result >= 0:
        print("WON", name)
    elif not refused and sys.argv[1:]:
        print("WON", name, "reached the kernel:", os.strerror(ctypes.get_errno()))
    print(name, result, os.strerror(ctypes.get_errno()), file=sys.stderr)
"""


@attack("calls-that-no-agent-needs")
async def calls_that_no_agent_needs(place: Place, stakes: Stakes) -> str:
    return await python(place, CALLS)


FAMILIES = """
import socket, sys
raw, stream = socket.SOCK_RAW, socket.SOCK_STREAM
families = {socket.AF_PACKET: raw, socket.AF_INET: raw, socket.AF_VSOCK: stream, socket.AF_ALG: 5, 15: raw}
for family, kind in families.items():
    try:
        socket.socket(family, kind, 1 if family == socket.AF_INET else 0)
        print("WON", family)
    except OSError as error:
        print(family, error, file=sys.stderr)
"""


@attack("sockets-of-other-kinds")
async def sockets_of_other_kinds(place: Place, stakes: Stakes) -> str:
    return await python(place, FAMILIES)


ATTACKS: tuple[Attack, ...] = (
    mounts,
    own_namespaces,
    namespaces_of_others,
    setuid_programs,
    tracing_the_first_process,
    signals_to_the_first_process,
    kernel_keyrings,
    shared_memory,
    files_of_a_neighbour,
    processes_of_a_neighbour,
    calls_that_no_agent_needs,
    sockets_of_other_kinds,
)
