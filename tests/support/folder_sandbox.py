"""A sandbox without walls for tests of what runs commands: a folder stands for `/workspace`."""

import asyncio
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from openforge.sandbox.contract import ExecResult, SandboxLost


class FolderSandbox:
    id = "folder"
    isolation = "reduced"

    def __init__(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        self.folder = folder
        self.lost = False

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
        if self.lost:
            raise SandboxLost("the test took it away")
        argv = ["/bin/sh", "-c", command] if isinstance(command, str) else list(command)
        started = time.monotonic()
        process = await asyncio.create_subprocess_exec(
            *argv,
            cwd=self.folder,
            env={**os.environ, **(env or {})},
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            out, err = await asyncio.wait_for(process.communicate(stdin), timeout_s)
        except TimeoutError:
            process.kill()
            await process.wait()
            return ExecResult(exit_code=124, stdout=b"", stderr=b"", timed_out=True)
        wall_s = time.monotonic() - started
        code = process.returncode or 0
        return ExecResult(exit_code=code, stdout=out[:output_cap], stderr=err[:output_cap], wall_s=wall_s)

    async def put(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        file = self.folder / path.removeprefix("/workspace/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data)
        file.chmod(mode)

    async def put_tar(self, path: str, tar: bytes) -> None:
        raise NotImplementedError

    async def get(self, path: str, *, cap: int = 8 << 20) -> bytes:
        return (self.folder / path.removeprefix("/workspace/")).read_bytes()

    async def get_tar(self, paths: Sequence[str], *, cap: int = 64 << 20) -> bytes:
        raise NotImplementedError

    async def stop(self) -> None:
        self.lost = True
