"""What stands beside the bus: engine, proxy, model, sandboxes, health files, disks."""

import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import msgspec

from openforge.bus import BadSettings
from openforge.cli.doctor.deployment import Deployment
from openforge.cli.doctor.finding import Finding, fault, note, ok, skipped
from openforge.models import UnknownModel, resolve
from openforge.runs import RunConfig
from openforge.sandbox.choice import DriverSettings, open_driver, with_runtime
from openforge.sandbox.contract import CannotIsolate, SandboxLost, SandboxSpec
from openforge.service import read_health
from openforge.service.settings import settings_from_env
from openforge.wire.generate import WeightInfo

_CALL_S = 5.0
_STALE_S = 15.0
_UNAUTHORIZED = 401


async def findings(deployment: Deployment, config: RunConfig | None, published: int | None) -> AsyncIterator[Finding]:
    yield await _engine(deployment.engine_url, published)
    yield await _proxy(deployment.proxy_url)
    yield _model(deployment.model or (config.model.path if config else ""))
    yield await _sandbox(config) if deployment.sandbox else skipped("sandbox", "not asked for (--no-sandbox)")
    for finding in (*_health(deployment.health), *_disks(deployment.folders, deployment.free_mb)):
        yield finding


async def _engine(url: str, published: int | None) -> Finding:
    if not url:
        return skipped("engine", "no address is known (OPENFORGE_ENGINE_URL)")
    port = "free the port or give the engine another (OPENFORGE_ENGINE_URL)"
    try:
        async with httpx.AsyncClient(timeout=_CALL_S) as http:
            healthy = await http.get(f"{url}/health")
            info = await http.get(f"{url}/weight_info")
    except httpx.HTTPError as error:
        return fault("engine", f"nobody answers at {url}: {error!r}", "start the engine, or set OPENFORGE_ENGINE_URL")
    if healthy.status_code == 503 or info.status_code == 503:
        return fault(
            "engine", f"{url} serves no weights yet", "wait for the learner's first version, or read the engine's log"
        )
    try:
        version = msgspec.json.decode(info.content, type=WeightInfo).weight_version
    except msgspec.MsgspecError:
        return fault("engine", f"what answers at {url} is no engine of ours", port)
    if published is not None and version.isdecimal() and int(version) < published:
        return fault(
            "engine",
            f"it serves version {version}, and {published} is published",
            "read the engine's log: it may not reach the weights' folder, or has another model; restart it",
        )
    return ok("engine", f"{url} serves version {version}")


async def _proxy(url: str) -> Finding:
    if not url:
        return skipped("proxy", "no address is known (OPENFORGE_PROXY_URL)")
    try:
        async with httpx.AsyncClient(timeout=_CALL_S) as http:
            answer = await http.get(f"{url}/ep/doctor.0/v1/models")
    except httpx.HTTPError as error:
        return fault("proxy", f"nobody answers at {url}: {error!r}", "start the proxy, or set OPENFORGE_PROXY_URL")
    if answer.status_code != _UNAUTHORIZED:
        return fault(
            "proxy",
            f"what answers at {url} takes a call without a key with {answer.status_code}: it is no proxy of ours",
            "free the port or give the proxy another (OPENFORGE_PROXY_URL)",
        )
    return ok("proxy", f"{url} answers, and refuses who has no key")


def _model(model: str) -> Finding:
    if not model:
        return skipped("model", "no run is known, and --model was not given")
    try:
        return ok("model", str(resolve(model)))
    except UnknownModel as error:
        return fault("model", str(error), "`openforge model get NAME`, or mount the folder here under the same path")


_NO_SANDBOX = {
    "process": "install bubblewrap and allow user namespaces, or run the manager as root",
    "docker": "start the daemon, set OPENFORGE_SANDBOX_SOCKET to its socket and OPENFORGE_SANDBOX_IMAGE to an image",
    "kubernetes": "give the pod's account the rights that docs/isolation.md lists, or set OPENFORGE_SANDBOX_KUBECONFIG",
}


async def _sandbox(config: RunConfig | None) -> Finding:
    """One box from its making to its end, here: the doctor runs where the sandbox manager does."""
    began = time.monotonic()
    try:
        settings = with_runtime(settings_from_env(DriverSettings), config.environment.runtime if config else "")
    except BadSettings as error:
        return fault("sandbox", str(error), "change it where the manager's environment is set")
    except CannotIsolate as error:
        return fault("sandbox", str(error), "change it where the manager's environment is set, or the run file")
    try:
        with tempfile.TemporaryDirectory(prefix="openforge-doctor-") as folder:
            driver = await open_driver(settings, Path(folder), owner="doctor", allow_reduced=True)
            try:
                box = await driver.create(SandboxSpec(name="doctor", network="none"))
                result = await box.exec("echo well", timeout_s=10.0)
                await box.stop()
            finally:
                await driver.close()
    except (CannotIsolate, SandboxLost, ValueError, OSError) as error:
        return fault("sandbox", str(error), _NO_SANDBOX[settings.sandbox_driver])
    if result.stdout != b"well\n":
        return fault("sandbox", f"it ended with {result.exit_code}: {result.stderr!r}", "run its command by hand")
    if driver.isolation == "reduced" and not (config and config.run.trusted_only):
        return note(
            "sandbox", "isolation is reduced", "run the manager as root, or say run.trusted_only = true for own tasks"
        )
    return ok("sandbox", f"one lived for {time.monotonic() - began:.1f} s, isolation {driver.isolation}")


def _health(folder: Path | None) -> Iterator[Finding]:
    for file in sorted(folder.glob("*.json")) if folder else ():
        state = read_health(file)
        if state is None:
            continue
        waiting = state.detail.get("waiting_for", "")
        if (silent_s := time.time() - state.at) > _STALE_S:
            yield fault(
                f"health of {state.service}",
                f"silent for {silent_s:.0f} s",
                f"it died or hangs: read its log, end pid {state.pid} and start it again",
            )
        elif not state.ready:
            yield fault(
                f"health of {state.service}", f"not ready {waiting and f'(waits for {waiting})'}", "read its log"
            )
        else:
            yield ok(f"health of {state.service}", "ready")


def _disks(folders: tuple[Path, ...], free_mb: int) -> Iterator[Finding]:
    for folder in folders:
        if not folder.is_dir():
            yield fault(f"disk of {folder}", "there is no such folder", "make or mount it")
        elif (free := shutil.disk_usage(folder).free >> 20) < free_mb:
            yield fault(
                f"disk of {folder}",
                f"{free} MB are free, less than {free_mb}",
                "make room: export and purge old runs, keep fewer checkpoints (learner.keep_checkpoints)",
            )
        else:
            yield ok(f"disk of {folder}", f"{free} MB are free")
