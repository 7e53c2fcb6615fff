"""Conversations and their tokens: one canonical message model, and the renderer contract.

Promises: sampled tokens are never re-tokenised; `bridge` returns ids that begin with what it was
given, or None where it cannot prove that the template allows it.
"""

from collections.abc import Sequence
from typing import Any, Literal, Protocol

import msgspec


class ToolCall(msgspec.Struct, frozen=True, kw_only=True):
    """`arguments` is the JSON text as sampled, which need not parse."""

    id: str
    name: str
    arguments: str


class Image(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A picture that stood in a message: `at` characters of its text came before it.

    `digest` is `sha256:` and the hex of its bytes, or of its URL where the harness sent only that; then `size`, in
    bytes, is 0.
    """

    digest: str
    media_type: str = ""
    size: int = 0
    at: int = 0


class Message(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One message of any dialect after normalising: content is text, null and absent are empty."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    name: str = ""
    images: tuple[Image, ...] = ()


class Tool(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A function that the model may call. `name` is what the model calls it.

    Where a `namespace` is set, `name` begins with it and a dot, and the harness knows the rest. A custom tool takes
    free text: the model sees a function with one string argument, `input`.
    """

    name: str
    description: str = ""
    parameters: dict[str, Any] = {}
    kind: Literal["function", "custom"] = "function"
    namespace: str = ""
    strict: bool = False

    @property
    def told_name(self) -> str:
        """The name within its namespace."""
        return self.name.removeprefix(f"{self.namespace}.") if self.namespace else self.name


CUSTOM_PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
}
"""The `parameters` of every custom tool."""


class Parsed(msgspec.Struct, frozen=True, kw_only=True):
    """An answer as a message. `broken` says what in it does not parse, in the order of appearance."""

    content: str
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    broken: tuple[str, ...] = ()


class ToolChoice(msgspec.Struct, frozen=True):
    """What the harness wants of calls: as the model likes, none, at least one, or one of those in `names`.

    `names` are those of `Tool.name`.
    """

    mode: Literal["auto", "none", "required", "named"] = "auto"
    names: tuple[str, ...] = ()


class Guide(msgspec.Struct, frozen=True, kw_only=True):
    """What an answer has to match: a JSON schema, or a grammar in llguidance's Lark."""

    schema: str = ""
    grammar: str = ""


class Renderer(Protocol):
    """Messages to ids and ids to messages, for one family of templates and one tokenizer.

    `holds`: from the first of these texts on, an answer to a request with tools is more than content and
    can only be read when it is complete. `thinking`: what stands before and after the reasoning where an answer
    begins with it; None for a model that does not reason. `call_ends` is the text that ends a call. `sees_images`:
    images have a place in its prompts.
    """

    stop_token_ids: tuple[int, ...]
    holds: tuple[str, ...]
    thinking: tuple[str, str] | None
    call_ends: str
    sees_images: bool

    def render(self, messages: Sequence[Message], tools: Sequence[Tool]) -> list[int]:
        """The ids of a prompt, generation prompt included."""
        ...

    def prepare(self, messages: Sequence[Message], tools: Sequence[Tool]) -> None:
        """Do ahead what of `render` or `bridge` takes long, so that they find it done. Any thread may call it."""
        ...

    def bridge(
        self, prompt_and_answer: Sequence[int], new_messages: Sequence[Message], tools: Sequence[Tool]
    ) -> list[int] | None:
        """The ids to append to a recorded prompt and answer so that `new_messages` come next.

        Closes a truncated answer. An assistant message among the new ones is text that nobody sampled here, as
        `render` would write it. None where the template cannot be continued so.
        """
        ...

    def parse(self, ids: Sequence[int], tools: Sequence[Tool]) -> Parsed:
        """The message that sampled `ids` stand for, stop token dropped."""
        ...

    def guide(self, tools: Sequence[Tool], choice: ToolChoice, *, parallel: bool, schema: bytes) -> Guide | None:
        """What an answer has to look like so that it makes the calls that are wanted, makes none beside those that are
        allowed, or matches `schema`; None for any.

        `parallel` allows several calls where calls are guided.
        """
        ...

    def text(self, ids: Sequence[int]) -> str:
        """What `ids` read as, special tokens left out; U+FFFD where bytes are not a whole character."""
        ...
