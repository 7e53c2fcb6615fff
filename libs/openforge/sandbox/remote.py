"""A sandbox at the other end of a connection: the contract, call by call.

Promises: a call reaches the one sandbox that its token names and no other; what the sandbox raises is
raised here as what it was; whoever holds no valid token gets `SandboxLost` and learns nothing else.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Literal

import msgspec

from openforge.sandbox.contract import ExecResult, FileInfo, PathRefused, Sandbox, SandboxLost


class Exec(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    command: str | list[str]
    timeout_s: float
    cwd: str
    env: dict[str, str]
    stdin: bytes
    output_cap: int


class Put(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    path: str
    data: bytes
    mode: int


class PutTar(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    path: str
    tar: bytes


class Get(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    path: str
    cap: int


class GetTar(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    paths: list[str]
    cap: int


class ListFiles(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    path: str
    most: int


class KillAll(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    pass


class Failed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """What the sandbox raised, by kind."""

    kind: Literal["lost", "refused", "wrong"]
    text: str


class Data(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    data: bytes = b""


class Ran(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    result: ExecResult


class Listed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    files: list[FileInfo]


Request = Exec | Put | PutTar | Get | GetTar | KillAll | ListFiles
Reply = Ran | Data | Failed | Listed
Ask = Callable[[Request], Awaitable[Reply]]


class RemoteSandbox:
    """See `openforge.sandbox.contract.Sandbox`. Its owner ends it: `stop` here only forgets it.

    `exec_sync` is for harnesses that cannot await; call it from any thread but the event loop's.
    """

    def __init__(self, sandbox_id: str, isolation: Literal["full", "reduced"], ask: Ask) -> None:
        self.id = sandbox_id
        self.isolation = isolation
        self._ask = ask
        self._loop = asyncio.get_running_loop()
        self._stopped = False

    async def exec(
        self,
        command: str | Sequence[str],
        *,
        timeout_s: float,
        cwd: str = "/workspace",
        env: Mapping[str, str] | None = None,
        stdin: bytes = b"",
        output_cap: int = 1 << 20,
    ) -> ExecResult:
        reply = await self._call(
            Exec(
                command=_sendable(command) if isinstance(command, str) else [_sendable(part) for part in command],
                timeout_s=timeout_s,
                cwd=_sendable(cwd),
                env={_sendable(key): _sendable(value) for key, value in (env or {}).items()},
                stdin=stdin,
                output_cap=output_cap,
            )
        )
        if not isinstance(reply, Ran):
            raise SandboxLost(f"the answer to a command was {type(reply).__name__}")
        return reply.result

    def exec_sync(self, command: str | Sequence[str], *, timeout_s: float, **options: Any) -> ExecResult:
        return asyncio.run_coroutine_threadsafe(self.exec(command, timeout_s=timeout_s, **options), self._loop).result()

    async def put(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        await self._call(Put(path=path, data=data, mode=mode))

    async def put_tar(self, path: str, tar: bytes) -> None:
        await self._call(PutTar(path=path, tar=tar))

    async def get(self, path: str, *, cap: int = 8 << 20) -> bytes:
        return await self._data(Get(path=path, cap=cap))

    async def get_tar(self, paths: Sequence[str], *, cap: int = 64 << 20) -> bytes:
        return await self._data(GetTar(paths=list(paths), cap=cap))

    async def list_files(self, path: str, *, most: int = 10_000) -> list[FileInfo]:
        reply = await self._call(ListFiles(path=path, most=most))
        if not isinstance(reply, Listed):
            raise SandboxLost(f"the answer to ListFiles was {type(reply).__name__}")
        return reply.files

    async def kill_all(self) -> None:
        await self._call(KillAll())

    async def stop(self) -> None:
        self._stopped = True

    async def _data(self, request: Request) -> bytes:
        reply = await self._call(request)
        if not isinstance(reply, Data):
            raise SandboxLost(f"the answer to {type(request).__name__} was {type(reply).__name__}")
        return reply.data

    async def _call(self, request: Request) -> Reply:
        if self._stopped:
            raise SandboxLost("the sandbox was given up")
        reply = await self._ask(request)
        if isinstance(reply, Failed):
            raise {"lost": SandboxLost, "refused": PathRefused, "wrong": ValueError}[reply.kind](reply.text)
        return reply


def _sendable(text: str) -> str:
    """Lone surrogates cannot be sent as text; bytes that came from a file name stay what they were nowhere else."""
    return text.encode("utf-8", "replace").decode()


async def answer(sandbox: Sandbox, request: Request) -> Reply:
    """Do for `sandbox` what was asked; what it raises becomes the answer."""
    try:
        return await _do(sandbox, request)
    except SandboxLost as lost:
        return Failed(kind="lost", text=str(lost))
    except PathRefused as refused:
        return Failed(kind="refused", text=str(refused))
    except ValueError as wrong:
        return Failed(kind="wrong", text=str(wrong))


async def _do(sandbox: Sandbox, request: Request) -> Reply:
    match request:
        case Exec():
            result = await sandbox.exec(
                request.command,
                timeout_s=request.timeout_s,
                cwd=request.cwd,
                env=request.env,
                stdin=request.stdin,
                output_cap=request.output_cap,
            )
            return Ran(result=result)
        case Put():
            await sandbox.put(request.path, request.data, mode=request.mode)
        case PutTar():
            await sandbox.put_tar(request.path, request.tar)
        case Get():
            return Data(data=await sandbox.get(request.path, cap=request.cap))
        case GetTar():
            return Data(data=await sandbox.get_tar(request.paths, cap=request.cap))
        case ListFiles():
            files = await sandbox.list_files(request.path, most=request.most)
            return Listed(files=[msgspec.structs.replace(file, name=_sendable(file.name)) for file in files])
        case KillAll():
            await sandbox.kill_all()
    return Data()
