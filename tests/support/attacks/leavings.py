"""Attacks on the owner: processes that outlive their end, and things that lie in wait for whoever takes the work."""

import asyncio
import io
import tarfile

from attacks.attack import Attack, Place, Stakes, attack, python, shell
from openforge.sandbox.contract import PathRefused

HEARTBEAT = """
import os, signal, sys, time
def apart():
    if os.fork():
        os._exit(0)
    os.setsid()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
if os.fork():
    sys.stdout.flush()
    time.sleep(float(sys.argv[1]))
    os._exit(0)
apart()
for fd in (0, 1, 2):
    os.dup2(os.open("/dev/null", os.O_RDWR), fd)
beat = "import os, time\\nuntil = time.time() + 20\\nwhile time.time() < until:\\n"
beat += " with open('beat~', 'w') as file: file.write(str(time.time_ns()))\\n os.replace('beat~', 'beat')\\n"
body = beat + " time.sleep(0.01)"
relay = beat + " if os.fork(): os._exit(0)\\n os.setsid()\\n time.sleep(0.002)"
os.execve("/usr/bin/python3", ["-", "-I", "-c", relay if sys.argv[2:] else body], {})
"""


async def beats(place: Place) -> str:
    """Whether something still writes; where there was nothing that wrote, the attack itself is broken."""
    before = await place.fetch("beat")
    assert before, "it never wrote"
    for _ in range(4):
        await asyncio.sleep(0.2)
        if await place.fetch("beat") != before:
            return "it still writes"
    return ""


@attack("outliving-the-time-out")
async def outliving_the_time_out(place: Place, stakes: Stakes) -> str:
    """In a session of its own, its parents gone, its environment empty, deaf to every signal that can be refused."""
    await place.run(["/usr/bin/python3", "-I", "-c", HEARTBEAT, "30"], timeout_s=2.5)
    return await beats(place)


@attack("forking-while-it-is-killed")
async def forking_while_it_is_killed(place: Place, stakes: Stakes) -> str:
    """Each process lives for two milliseconds and leaves another: no list of them is ever true."""
    await place.run(["/usr/bin/python3", "-I", "-c", HEARTBEAT, "30", "relay"], timeout_s=2.5)
    return await beats(place)


@attack("outliving-the-end", guard="owner")
async def outliving_the_end(place: Place, stakes: Stakes) -> str:
    """A late writer would change the work while it is taken."""
    await place.run(["/usr/bin/python3", "-I", "-c", HEARTBEAT, "1.5"])
    await place.end_work()
    return await beats(place)


async def fetched(place: Place, name: str) -> bytes:
    try:
        return await place.fetch(name)
    except PathRefused:
        return b""


@attack("link-to-a-file-of-the-host", guard="owner")
async def link_to_a_file(place: Place, stakes: Stakes) -> str:
    await shell(place, f"ln -s {stakes.file} answer")
    return "the secret" if stakes.secret.encode() in await fetched(place, "answer") else ""


@attack("link-into-proc", guard="owner")
async def link_into_proc(place: Place, stakes: Stakes) -> str:
    """`/proc/self` is whoever reads."""
    await shell(place, f"ln -s /proc/self/root{stakes.file} answer")
    return "the secret" if stakes.secret.encode() in await fetched(place, "answer") else ""


@attack("link-in-the-artifacts", guard="owner")
async def link_in_the_artifacts(place: Place, stakes: Stakes) -> str:
    await shell(place, f"ln -s {stakes.file} answer; ln -s {stakes.folder} folder")
    return "the secret" if stakes.secret.encode() in await place.collect() else ""


@attack("pipe-that-nobody-writes", guard="owner")
async def pipe_that_nobody_writes(place: Place, stakes: Stakes) -> str:
    await shell(place, "mkfifo answer")
    try:
        await fetched(place, "answer")
    except TimeoutError:
        return "its owner waits for ever"
    return ""


@attack("file-without-end", guard="owner")
async def file_without_end(place: Place, stakes: Stakes) -> str:
    await shell(place, "ln -s /dev/zero answer; truncate -s 100G sparse")
    taken = max(len(await fetched(place, "answer")), len(await fetched(place, "sparse")))
    return f"{taken} bytes were read" if taken > 8 << 20 else ""


@attack("more-artifacts-than-anybody-takes", guard="owner")
async def too_many_artifacts(place: Place, stakes: Stakes) -> str:
    await shell(place, "truncate -s 200M sparse")
    try:
        tar = await place.collect()
    except PathRefused:
        return ""
    return f"{len(tar)} bytes were taken" if len(tar) > 100 << 20 else ""


@attack("rights-in-the-artifacts", guard="owner")
async def rights_in_the_artifacts(place: Place, stakes: Stakes) -> str:
    await shell(place, "cp /usr/bin/id root; chmod 6755 root")
    with tarfile.open(fileobj=io.BytesIO(await place.collect())) as tar:
        special = [member.name for member in tar if member.mode & 0o7000]
    return f"set-user bits on {special}" if special else ""


@attack("crowded-folder", guard="owner")
async def crowded_folder(place: Place, stakes: Stakes) -> str:
    await python(place, "import os\nfor n in range(20_000): os.link('0', f'{n}') if n else open('0', 'w').close()")
    try:
        names = await place.names()
    except PathRefused:
        return ""
    return f"{len(names)} names were listed" if len(names) > 10_000 else ""


def archive(*members: tuple[str, bytes, str]) -> bytes:
    """Members as (name, type, where it links to); files say `planted`."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for name, kind, link in members:
            info = tarfile.TarInfo(name)
            info.type, info.linkname, info.mode = kind, link, 0o777
            info.size = 7 if kind == tarfile.REGTYPE else 0
            tar.addfile(info, io.BytesIO(b"planted"))
    return out.getvalue()


async def planted(place: Place, stakes: Stakes, name: str, tar: bytes) -> str:
    """Whether unpacking the archive wrote to the stakes' folder, or anywhere beside the work."""
    try:
        await place.unpack(tar)
    except PathRefused:
        return ""
    outside = (stakes.folder / name).exists()
    (stakes.folder / name).unlink(missing_ok=True)
    beside = await shell(place, f"for f in /tmp/{name} ../{name}; do test -e $f && echo WON $f; done")
    return f"{stakes.folder}/{name} was written" if outside else beside


@attack("archive-that-climbs", guard="owner")
async def archive_that_climbs(place: Place, stakes: Stakes) -> str:
    won = [
        await planted(place, stakes, "up", archive(("../up", tarfile.REGTYPE, ""))),
        await planted(place, stakes, "far", archive((f"{stakes.folder}/far", tarfile.REGTYPE, ""))),
        await planted(place, stakes, "in", archive(("a", tarfile.DIRTYPE, ""), ("a/../../in", tarfile.REGTYPE, ""))),
    ]
    return "; ".join(filter(None, won))


@attack("archive-through-a-link", guard="owner")
async def archive_through_a_link(place: Place, stakes: Stakes) -> str:
    through = archive(("door", tarfile.SYMTYPE, str(stakes.folder)), ("door/through", tarfile.REGTYPE, ""))
    return await planted(place, stakes, "through", through)


@attack("link-in-the-way-of-an-archive", guard="owner")
async def link_in_the_way(place: Place, stakes: Stakes) -> str:
    """It lay there before the owner put something in its place."""
    await shell(place, f"ln -s {stakes.folder} door; ln -s /tmp tmp")
    won = [
        await planted(place, stakes, "before", archive(("door/before", tarfile.REGTYPE, ""))),
        await planted(place, stakes, "inner", archive(("tmp/inner", tarfile.REGTYPE, ""))),
    ]
    return "; ".join(filter(None, won))


@attack("archive-with-a-hard-link", guard="owner")
async def archive_with_a_hard_link(place: Place, stakes: Stakes) -> str:
    """A hard link to a file, then a write to it, is a write to that file."""
    try:
        await place.unpack(archive(("hard", tarfile.LNKTYPE, f"../../../../../../../..{stakes.file}")))
    except (PathRefused, KeyError):
        return ""
    return "the secret" if stakes.secret.encode() in await fetched(place, "hard") else ""


ATTACKS: tuple[Attack, ...] = (
    outliving_the_time_out,
    forking_while_it_is_killed,
    outliving_the_end,
    link_to_a_file,
    link_into_proc,
    link_in_the_artifacts,
    pipe_that_nobody_writes,
    file_without_end,
    too_many_artifacts,
    rights_in_the_artifacts,
    crowded_folder,
    archive_that_climbs,
    archive_through_a_link,
    link_in_the_way,
    archive_with_a_hard_link,
)
