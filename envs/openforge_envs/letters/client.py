"""One question to the policy with the `openai` client. Slow to import, so only where an episode runs.

Promises: all episodes of an event loop share one connection pool (a client of its own for each would
cost 50 ms of CPU time, ten times the call); each call bears its own attempt's key.
"""

import asyncio
from weakref import WeakKeyDictionary

from openai import APIError, AsyncOpenAI, BadRequestError

from openforge.env.contract import LlmArgs

__all__ = ["APIError", "ContextFull", "ask"]

RETRIES = 6  # with the client's own back-off about 20 s: longer than a service takes to restart

_clients: WeakKeyDictionary[asyncio.AbstractEventLoop, AsyncOpenAI] = WeakKeyDictionary()


class ContextFull(Exception):
    """The conversation does not fit the model's window."""


async def ask(instruction: str, llm_args: LlmArgs) -> str:
    """The policy's answer; raises `ContextFull` and `APIError`."""
    client = _shared().copy(base_url=llm_args.base_url, api_key=llm_args.api_key)
    try:
        reply = await client.chat.completions.create(
            model=llm_args.model,
            messages=[{"role": "user", "content": instruction}],
            temperature=llm_args.temperature,
            top_p=llm_args.top_p,
            max_tokens=llm_args.max_tokens,
        )
    except BadRequestError as error:
        if error.code == "context_length_exceeded":
            raise ContextFull from error
        raise
    return reply.choices[0].message.content or ""


def _shared() -> AsyncOpenAI:
    loop = asyncio.get_running_loop()
    if loop not in _clients:
        _clients[loop] = AsyncOpenAI(base_url="http://127.0.0.1", api_key="none", max_retries=RETRIES)
    return _clients[loop]
