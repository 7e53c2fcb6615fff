"""The services as they would run in pods: the manifests' own commands, variables, files, probes and credentials, three
NATS nodes with TLS, and streams with three replicas."""

import asyncio
import copy
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import msgspec
import pytest
from manifests import Object, container_of, rendered
from pods import Cluster, cluster

from openforge.bus import CAUGHT_UP, Bus
from openforge.cli.doctor import Deployment, Finding, examine
from openforge.runs.ledger import ledger_of
from openforge.runs.progress import FOLDED, Progress

TINY = Path(__file__).parents[2] / "examples" / "tiny.toml"
RUN = "tiny"
SERVICES = ("scheduler", "sandbox-manager", "proxy", "engine", "verifier", "learner")
STREAMS = ("RUN", "GROUP", "EPISODE", "TURN", "TRAJECTORY", "POLICY")
SLOW_S = 600.0
"""Nothing here is about speed: a busy machine may take its time."""

pytestmark = pytest.mark.long


@asynccontextmanager
async def watched(bus: Bus) -> AsyncIterator[Progress]:
    """How far the run is, by its facts."""
    progress = Progress()

    async def follow() -> None:
        async for told in bus.follow(FOLDED, run=RUN):
            if told is not CAUGHT_UP:
                progress.apply(told.fact, told.at)

    following = asyncio.create_task(follow())
    try:
        yield progress
    finally:
        following.cancel()


async def trained(progress: Progress, version: int, pods: Cluster) -> None:
    """Returns once the version is."""
    try:
        async with asyncio.timeout(SLOW_S):
            while progress.trained < version:
                pods.still_kept()
                await asyncio.sleep(0.1)
    except TimeoutError:
        pytest.fail(f"version {version} was not trained\n{pods.last_words()}")


async def node_that_leads_most(bus: Bus) -> str:
    led = [(await bus.link.ask_api(f"STREAM.INFO.{stream}"))["cluster"].get("leader", "") for stream in STREAMS]
    return max(sorted(set(led)), key=led.count)


async def is_alive(pods: Cluster, name: str) -> bool:
    """As a kubelet asks by the manifest's probe."""
    pod = next(pod for pod in pods.pods if pod.name == name)
    how = container_of(pod.workload)["livenessProbe"]
    if "httpGet" in how:
        async with httpx.AsyncClient() as http:
            answer = await http.get(f"http://{pod.ip}:8222{how['httpGet']['path']}")
        return answer.status_code == 200
    command = [pod.translate(part, pods.hosts) for part in how["exec"]["command"]]
    done = await asyncio.to_thread(subprocess.run, command, env=dict(pods.environment(pod.app)))
    return done.returncode == 0


async def faults(pods: Cluster) -> list[Finding]:
    """What the doctor finds, as operator; replicas that are still catching up are given time."""
    what = Deployment(bus=pods.operator(), keys=pods.folder / "keys" / "nkeys", sandbox=False)
    for _ in range(60):
        found = [finding async for finding in examine(what) if finding.state == "fault"]
        if not any("not up to date" in finding.said for finding in found):
            break
        await asyncio.sleep(1.0)
    return found


@asynccontextmanager
async def training(
    folder: Path, objects: tuple[Object, ...], *overrides: str
) -> AsyncIterator[tuple[Cluster, Bus, Progress]]:
    """A run on the cluster, submitted from beside it, whose first step is trained; leaving waits for its end."""
    sets = [part for override in ("evaluation.heldout_episodes=0", *overrides) for part in ("--set", override)]
    async with cluster(folder, objects, RUN) as pods:
        for job in ("bus-set-up", "model"):
            await pods.complete(job, within_s=SLOW_S)
        train = await pods.client("train", str(TINY), "--remote", pods.operator().url, "--plain", *sets)
        async with Bus.connect(pods.operator(), name="test") as bus, watched(bus) as progress:
            await trained(progress, 1, pods)
            yield pods, bus, progress
            async with asyncio.timeout(SLOW_S):
                assert await train.wait() == 0, pods.last_words()
            ledger = await ledger_of(bus, RUN)
    assert ledger.closes, ledger.differences
    assert ledger.versions == progress.trained
    assert ledger.lag_max <= 1


async def kill_and_go_on(pods: Cluster, progress: Progress, pod: str) -> None:
    """Until a step is trained that was not when it was killed."""
    before = progress.trained
    await pods.kill(pod)
    await trained(progress, before + 1, pods)


async def test_nothing_is_lost_when_a_nats_node_and_each_service_are_killed(tmp_path: Path) -> None:
    async with training(tmp_path, rendered("local-cpu"), "run.steps=16") as (pods, bus, progress):
        victims = [await node_that_leads_most(bus), *(pods.named(app).name for app in SERVICES)]
        for victim in victims:
            assert await is_alive(pods, victim), pods.last_words()
            await kill_and_go_on(pods, progress, victim)
        found = await faults(pods)
        assert all(pods.process(victim).starts > 1 for victim in victims)
    assert msgspec.to_builtins(found) == []


def on_two_nodes(found: Object) -> Object:
    """The learner's Job as overlay `gpu` makes it, without its GPUs."""
    if (found["kind"], found["metadata"]["name"]) != ("Job", "learner"):
        return found
    changed = copy.deepcopy(found)
    changed["spec"] |= {"completions": 2, "parallelism": 2}
    command = container_of(changed)["command"]
    command[command.index("--nnodes=1")] = "--nnodes=2"
    return changed


async def test_ranks_in_two_pods_meet_and_meet_again_when_either_is_killed(tmp_path: Path) -> None:
    objects = tuple(map(on_two_nodes, rendered("local-cpu")))
    async with training(tmp_path, objects, "run.steps=8", "learner.world_size=2") as (pods, _, progress):
        await kill_and_go_on(pods, progress, "learner-1")
        await kill_and_go_on(pods, progress, "learner-0")
