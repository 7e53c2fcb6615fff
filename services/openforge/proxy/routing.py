"""What a mixture of experts chose for the tokens of a call.

Promises: a file that is kept tells of exactly the tokens that its turn adds and that were computed; a call whose engine
tells something else is recorded without.
"""

import asyncio
import binascii

from openforge.proxy.turns import Placement, Sampled
from openforge.service import log
from openforge.wire.routed import NoRouting, extent_of

MOST_BYTES = 256 << 20
"""Of one call: 130,000 tokens of the largest open mixture are 125 MB."""


def routed_from(placement: Placement) -> int:
    """Which token of prompt and answer is the first that the call tells of: what its parent does not. That is the last
    one of the parent's, too, which was not computed for it."""
    return max(placement.prefix - 1, 0)


async def routed_file(placement: Placement, sampled: Sampled) -> bytes | None:
    """The file to keep; None where the engine told nothing of use."""
    if not sampled.routed:
        return None
    expected = placement.prompt_tokens + len(sampled.ids) - 1 - routed_from(placement)
    try:
        return await asyncio.to_thread(_decoded, sampled.routed, expected)
    except NoRouting as error:
        log.warning("what the engine says of its experts is not recorded", why=str(error))
        return None


def _decoded(text: str, expected: int) -> bytes:
    if len(text) // 4 * 3 > MOST_BYTES:
        raise NoRouting(f"{len(text)} bytes in base64 are more than {MOST_BYTES}")
    try:
        file = binascii.a2b_base64(text, strict_mode=True)
    except ValueError as error:
        raise NoRouting(f"it is no base64: {error}") from error
    if (told := extent_of(file).tokens) != expected:
        raise NoRouting(f"it tells of {told} tokens, and {expected} were computed")
    return file
