"""Short episodes under random SIGKILLs of the manager, the NATS server and the sandboxes' daemon: is anything left?

`python tests/support/leak_soak.py --episodes 2000 --out docs/soak-leaks.json` (see `make soak`).

The run is an evaluation of a chat server in the model's place, so that all its work is episodes: every service is real,
and each agent leaves files, links, and two processes that would live for ever.
"""

import argparse
import asyncio
import os
import platform
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
from container_daemons import IMAGE, KilledAndRestarted
from leftovers import left_by
from stub_chat import StubChat, stub_chat

from openforge.cli.home import Home
from openforge.cli.soak import Disturbed, Pace, RunEnded, commit, disturbed, ledger_of_home

MANAGER, NATS, DAEMON = "sandbox_manager", "nats", "daemon"
ENVIRONMENT = Path(__file__).parent / "short_env"
TRIALS = 4

RUN_FILE = f"""
[run]
name = "leaks"
steps = 0
no_progress_s = 1200.0

[engine]
kind = "endpoint"
model = "echo"

[sampling]
max_tokens = 16

[environment]
name = "{ENVIRONMENT}"
harness = "short"

[environment.limits]
turns = 4
timeout_s = 300.0
memory_mb = 128
pids = 16
disk_mb = 4

[pacing]
group_size = 4
in_flight = 32
attempts = 8

[evaluation]
heldout_episodes = 1
trials = {TRIALS}
"""


async def leak_soak(
    folder: Path, *, episodes: int, kills: int, seed: int, docker: KilledAndRestarted | None = None
) -> dict[str, Any]:
    """What was done and what was left. `folder` holds the run and all temporary files of its processes."""
    rng = random.Random(seed)
    run, mark = f"leaks-{seed}-{os.getpid()}", f"86400.{os.getpid():06d}"
    targets = (MANAGER, NATS, *((DAEMON,) if docker else ()))
    at = sorted(rng.sample(range(episodes // 20, episodes), kills))
    (folder / "run.toml").write_text(RUN_FILE)
    load_before, began = os.getloadavg(), time.monotonic()
    with _temporary(folder / "tmp"), stub_chat(lambda _: "word") as chat:
        overrides = _overrides(chat.base_url, mark, episodes)
        async with disturbed(folder / "run.toml", folder, run, overrides, _driver_settings(docker)) as running:
            await _kill(running, chat, docker, rng, [(when, rng.choice(targets)) for when in at])
            exit_code = await running.process.wait()
        home = Home(run, folder)
        left = left_by(run, mark, _should_be_empty(home), docker.socket if docker else None)
        _, ledger = ledger_of_home(home)
    summary = msgspec.json.decode(home.summary.read_bytes())
    return {
        "episodes": summary["episodes"],
        "attempts": len(chat.requests),
        "kills": len(running.kills),
        "by_target": {target: sum(kill.target == target for kill in running.kills) for target in targets},
        "exit_code": exit_code,
        "ledger_closes": ledger["closes"],
        "left": msgspec.to_builtins(left),
        "nothing_left": left.none,
        "driver": "docker" if docker else "process",
        "wall_s": round(time.monotonic() - began, 1),
        "load_average": [round(load_before[0], 1), round(os.getloadavg()[0], 1)],
        "seed": seed,
        "commit": commit(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "evaluated": ledger["eval"],
    }


async def _kill(
    running: Disturbed,
    chat: StubChat,
    docker: KilledAndRestarted | None,
    rng: random.Random,
    plan: list[tuple[int, str]],
) -> None:
    """Each target when so many model calls were made."""
    pace = {target: Pace() for target in (MANAGER, NATS, DAEMON)}
    for when, target in plan:
        while len(chat.requests) < when or not pace[target].may():
            if running.process.returncode is not None:
                return
            await asyncio.sleep(0.05)
        await asyncio.sleep(rng.uniform(0.0, 0.5))
        try:
            kill = running.note(DAEMON, docker.kill()) if docker and target == DAEMON else await running.kill(target)
        except RunEnded:
            return
        pace[target].note()
        print(f"{kill.after_s:7.1f} s  {len(chat.requests)} calls  killed {target}", file=sys.stderr, flush=True)


def _overrides(url: str, mark: str, episodes: int) -> tuple[str, ...]:
    return (
        f'engine.url="{url}"',
        f'environment.options.mark="{mark}"',
        f"evaluation.heldout_episodes={episodes // TRIALS}",
    )


def _driver_settings(docker: KilledAndRestarted | None) -> dict[str, str]:
    if docker is None:
        return {}
    return {
        "OPENFORGE_SANDBOX_DRIVER": "docker",
        "OPENFORGE_SANDBOX_SOCKET": str(docker.socket),
        "OPENFORGE_SANDBOX_IMAGE": IMAGE,
    }


def _should_be_empty(home: Home) -> list[Path]:
    root = home.root
    return [root / "sandboxes", root / "verifier" / "boxes", root / "verifier" / "scratch", home.sockets]


@contextmanager
def _temporary(folder: Path) -> Iterator[None]:
    """Temporary files of this process and of all that it starts lie in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    before, tempfile.tempdir = tempfile.tempdir, str(folder)
    named = os.environ.get("TMPDIR")
    os.environ["TMPDIR"] = str(folder)
    try:
        yield
    finally:
        tempfile.tempdir = before
        if named is None:
            del os.environ["TMPDIR"]
        else:
            os.environ["TMPDIR"] = named


def main() -> int:
    parser = argparse.ArgumentParser(prog="leak_soak.py", description=__doc__)
    parser.add_argument("--episodes", type=int, default=2000)
    parser.add_argument("--kills", type=int, default=40)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--docker", action="store_true", help="sandboxes by a dockerd, which is killed too")
    parser.add_argument("--out", type=Path, help="write the JSON here too")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="ofl-", dir="/tmp") as folder:
        docker = KilledAndRestarted() if asked.docker else None
        try:
            result = asyncio.run(
                leak_soak(Path(folder), episodes=asked.episodes, kills=asked.kills, seed=asked.seed, docker=docker)
            )
        finally:
            if docker is not None:
                docker.stop()
    text = msgspec.json.format(msgspec.json.encode(result), indent=1).decode() + "\n"
    if asked.out is not None:
        asked.out.write_text(text)
    print(text)
    return 0 if result["nothing_left"] and result["ledger_closes"] and result["exit_code"] == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
