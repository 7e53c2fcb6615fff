"""Renderers by name, as run files name them in `model.renderer`."""

from collections.abc import Callable
from pathlib import Path

from openforge.chat.chatml import ChatMLHermes, load_tokenizer
from openforge.chat.contract import Renderer

_RENDERERS: dict[str, Callable[[str | Path], Renderer]] = {
    "chatml-hermes": lambda model_path: ChatMLHermes(load_tokenizer(model_path)),
}


class UnknownRenderer(ValueError):
    """The run file names a renderer that does not exist."""


def load_renderer(name: str, model_path: str | Path) -> Renderer:
    """The renderer `name` with the tokenizer of the folder `model_path`."""
    if name not in _RENDERERS:
        known = ", ".join(sorted(_RENDERERS))
        raise UnknownRenderer(f"model.renderer = {name!r} is not a renderer: use one of {known}")
    return _RENDERERS[name](model_path)
