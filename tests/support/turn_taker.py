"""A peer in the model proxy's place: answers every call and tells one turn for it, as the proxy would."""

import asyncio
import re
from pathlib import Path

from openforge.bus import Bus
from openforge.protos import (
    KEY_BUCKET,
    AttemptKey,
    BranchCause,
    EngineIdentity,
    FinishReason,
    Sampling,
    Timing,
    TurnRecorded,
    TurnStatus,
    key_entry,
    pack_ids,
    pack_logprobs,
)


class TurnTaker:
    """`seen` are the keys' entries as they were at each call."""

    def __init__(self, bus: Bus, run: str) -> None:
        self._bus = bus
        self._run = run
        self._turns: dict[tuple[str, int], int] = {}
        self.seen: list[AttemptKey] = []
        self.secrets: list[str] = []

    async def listen(self, path: Path) -> asyncio.Server:
        return await asyncio.start_unix_server(self._serve, path=str(path))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        found = re.search(r"/ep/([\w-]+)\.(\d+)/v1.*Bearer (\S+)", head, re.S)
        assert found is not None
        length = re.search(r"content-length: (\d+)", head, re.I)
        await reader.readexactly(int(length.group(1)) if length else 0)
        episode, attempt, secret = found.group(1), int(found.group(2)), found.group(3)
        self.secrets.append(secret)
        bucket = await self._bus.bucket(KEY_BUCKET)
        entry = await bucket.get(key_entry(self._run, secret))
        self.seen.append(AttemptKey.decode(entry.value or b""))
        turn = self._turns.get((episode, attempt), 0)
        self._turns[episode, attempt] = turn + 1
        await self._bus.tell(self._turn(episode, attempt, turn))
        body = b'{"choices": [{"message": {"role": "assistant", "content": "cat start.txt > done.txt"}}]}'
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%b" % (len(body), body))
        await writer.drain()
        writer.close()

    def _turn(self, episode: str, attempt: int, turn: int) -> TurnRecorded:
        return TurnRecorded(
            run=self._run,
            episode=episode,
            attempt=attempt,
            turn=turn,
            parent=None,
            cause=BranchCause.START,
            prefix=0,
            suffix=pack_ids([1]),
            sampled=pack_ids([2]),
            logprobs=pack_logprobs([-1.0]),
            versions=(),
            finish=FinishReason.STOP,
            status=TurnStatus.DELIVERED,
            sampling=Sampling(temperature=1.0),
            engine=EngineIdentity(engine="none"),
            timing=Timing(received_at=0.0),
        )
