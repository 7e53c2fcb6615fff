"""Background services of a sandbox: mock servers, browsers, whatever must be up before the agent is.

Promises: `start` returns when every service answers its health check, in the order given, and raises
`ServiceFailed` with a service's last words where one ends or is not healthy in time; nothing is left running
where it raises.
"""

import asyncio
from collections.abc import Sequence

import msgspec

from openforge.ending import cancel
from openforge.sandbox.contract import Sandbox, SandboxLost

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.02, 0.5
_OUTPUT_CAP = 1 << 16
_LAST_WORDS = 500


class ServiceFailed(Exception):
    """A service did not come up; the text says which, why, and what it said last."""


class Health(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """When a service is up: `command` ends with 0, or `port` accepts a connection and, with `path`, answers 2xx.

    `port` needs `bash` in the sandbox. None of them: the service is up once started.
    """

    command: tuple[str, ...] = ()
    port: int = 0
    path: str = ""
    timeout_s: float = 30.0


class Service(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One program in the background, as the sandbox's own user: what the agent's commands can do, they can do to it."""

    name: str
    command: tuple[str, ...]
    env: dict[str, str] = {}
    cwd: str = "/workspace"
    health: Health = Health()


def wrong_with(service: Service) -> list[str]:
    """What the types cannot say, in sentences that begin with the field."""
    health = service.health
    wrong = []
    if not service.command:
        wrong.append("command is empty: name the program to run")
    if health.command and health.port:
        wrong.append(f"health has command and port = {health.port}: use one of them")
    if not 0 <= health.port < 65536:
        wrong.append(f"health.port = {health.port}: use 1 to 65535")
    if health.path and (not health.port or not health.path.startswith("/") or any(c.isspace() for c in health.path)):
        wrong.append(f"health.path = {health.path!r}: write /... without blanks, and health.port beside it")
    if health.timeout_s <= 0:
        wrong.append(f"health.timeout_s = {health.timeout_s}: use more than 0 seconds")
    return wrong


class Services:
    """Those of one sandbox."""

    def __init__(self, box: Sandbox, *, longest_s: float) -> None:
        self._box = box
        self._longest_s = longest_s
        self._running: dict[str, asyncio.Task[str]] = {}

    async def start(self, services: Sequence[Service]) -> None:
        try:
            for service in services:
                self._running[service.name] = asyncio.create_task(self._live(service))
                await self._until_healthy(service, self._running[service.name])
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> None:
        """May be called twice, and after the sandbox is gone."""
        running, self._running = self._running, {}
        await cancel(*running.values())

    async def _live(self, service: Service) -> str:
        """Its whole life is one command; how that ended."""
        try:
            ended = await self._box.exec(
                service.command,
                timeout_s=self._longest_s,
                cwd=service.cwd,
                env=service.env,
                output_cap=_OUTPUT_CAP,
            )
        except SandboxLost as lost:
            return str(lost)
        said = (ended.stdout + ended.stderr)[-_LAST_WORDS:].decode(errors="replace").strip()
        return f"it ended with {ended.exit_code}" + (f": {said}" if said else "")

    async def _until_healthy(self, service: Service, running: "asyncio.Task[str]") -> None:
        pause_s, answer = _FIRST_PAUSE_S, "it was never asked"
        try:
            async with asyncio.timeout(service.health.timeout_s):
                while True:
                    if running.done():
                        raise ServiceFailed(f"service {service.name}: {running.result()}")
                    answer = await self._ask(service.health)
                    if not answer:
                        return
                    await asyncio.wait({running}, timeout=pause_s)
                    pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        except TimeoutError:
            timeout_s = service.health.timeout_s
            raise ServiceFailed(f"service {service.name}: not healthy after {timeout_s:g} s: {answer}") from None
        except SandboxLost as lost:
            raise ServiceFailed(f"service {service.name}: {lost}") from lost

    async def _ask(self, health: Health) -> str:
        """Empty where it is well, else what the check said."""
        command = health.command or _port_check(health)
        if not command:
            return ""
        result = await self._box.exec(command, timeout_s=max(1.0, health.timeout_s), cwd="/", output_cap=4096)
        if result.exit_code == 0:
            return ""
        said = (result.stdout + result.stderr)[-_LAST_WORDS:].decode(errors="replace").strip()
        return f"its check ended with {result.exit_code}" + (f": {said}" if said else "")


def _port_check(health: Health) -> tuple[str, ...]:
    if not health.port:
        return ()
    script = f"exec 3<>/dev/tcp/127.0.0.1/{health.port} || exit 1"
    if health.path:
        script += (
            '; printf "GET %s HTTP/1.0\\r\\nHost: localhost\\r\\n\\r\\n" "$1" >&3'
            '; read -r _ status _ <&3; echo "status $status"; case $status in 2*) exit 0;; esac; exit 1'
        )
    return ("/bin/bash", "-c", script, "-", health.path)
