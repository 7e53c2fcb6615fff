"""Reading what lies in a stream now, without a consumer.

Promises: what the stream's leader has acknowledged is found, also where a replica that answers is behind.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping

import msgspec
from nats.aio.msg import Msg
from nats.js.errors import NotFoundError

from openforge.bus.errors import BusError
from openforge.bus.inbox import status_of
from openforge.bus.link import ACK_TIMEOUT_S, RECONNECT_WAIT_S, Backoff, Link

_PAGE = 512
_PAGE_BYTES = 16 << 20


async def last_on(link: Link, stream: str, subject: str) -> Msg | None:
    """The newest message on a subject; None only if the stream's leader says so too."""
    message = await link.ask(f"$JS.API.DIRECT.GET.{stream}.{subject}")
    if status_of(message) is None:
        return message
    try:
        found = await link.ask_api(f"STREAM.MSG.GET.{stream}", {"last_by_subj": subject})
    except NotFoundError:
        return None
    return await at(link, stream, int(found["message"]["seq"]))


async def is_on(link: Link, stream: str, subject: str) -> bool:
    """Whether a subject holds a message, by the stream's leader: one question, where mostly there is none."""
    try:
        await link.ask_api(f"STREAM.MSG.GET.{stream}", {"last_by_subj": subject})
    except NotFoundError:
        return False
    return True


async def at(link: Link, stream: str, sequence: int) -> Msg | None:
    """The message at a sequence that is known to exist; None if it was purged."""
    backoff = Backoff()
    for _ in range(6):  # a replica may be behind its leader for a moment
        message = await link.ask(f"$JS.API.DIRECT.GET.{stream}", msgspec.json.encode({"seq": sequence}))
        if status_of(message) is None:
            return message
        await backoff.pause()
    return None


async def all_on(link: Link, stream: str, subjects: str, after: int = 0) -> AsyncIterator[Msg]:
    """Every message on these subjects now, in order, each once, breaks or not."""
    more = True
    while more:
        messages, more = await page(link, stream, subjects, {"seq": after + 1})
        for message in messages:
            after = sequence_of(message)
            yield message


async def page(link: Link, stream: str, subjects: str, start: Mapping[str, int | str]) -> tuple[list[Msg], bool]:
    """The next messages on these subjects from `start` on, in order, and whether there may be more.

    `start` is a `seq` or a `start_time` (RFC 3339). Leaves nothing on the server: no consumer, no acknowledgement.
    """
    messages: list[Msg] = []
    await link.up()
    async with link.inbox() as inbox:
        question = {
            **start,
            "next_by_subj": subjects,
            "batch": _PAGE,
            "max_bytes": max(_PAGE_BYTES, 2 * link.client.max_payload),
        }
        await link.tell_server(f"$JS.API.DIRECT.GET.{stream}", question, inbox.fresh_reply())
        while (arrived := await inbox.next(ACK_TIMEOUT_S)) is not None:
            message = arrived[1]
            status, headers = status_of(message), message.headers or {}
            if status is None:
                messages.append(message)
            elif status in ("204", "404"):
                return messages, status == "204" and int(headers.get("Nats-Num-Pending", 0)) > 0
            elif status == "503":
                await asyncio.sleep(RECONNECT_WAIT_S)
                break
            else:
                raise BusError(f"reading {subjects}: {status} {headers.get('Description', '')}")
    return messages, True  # a break or a lost answer: ask again from where we are


def sequence_of(message: Msg) -> int:
    """Where a message lies that was got directly."""
    return int((message.headers or {})["Nats-Sequence"])


async def subjects_on(link: Link, stream: str, subjects: str) -> dict[str, int]:
    """The subjects that hold messages, by the leader, with how many each."""
    found: dict[str, int] = {}
    while True:
        info = await link.ask_api(f"STREAM.INFO.{stream}", {"subjects_filter": subjects, "offset": len(found)})
        page = info["state"].get("subjects") or {}
        found |= page
        if not page or len(found) >= info.get("total", 0):
            return found
