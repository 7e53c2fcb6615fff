"""From the name of a model in a run file to a folder."""

import os
from collections.abc import Callable
from pathlib import Path

from openforge.models.byte_llama import tiny, tiny_moe
from openforge.models.long_llama import tiny_long
from openforge.models.smollm2 import smollm2_135m
from openforge.runs.model import BUILTIN as PREFIX
from openforge.runs.model import models_home

BUILTIN: dict[str, Callable[[Path], Path]] = {
    "smollm2-135m": smollm2_135m,
    "tiny": tiny,
    "tiny-long": tiny_long,
    "tiny-moe": tiny_moe,
}


class UnknownModel(ValueError):
    """There is no such model; the message says what there is and what to do."""


def builtin_folder(name: str) -> Path:
    """Where the built-in model `name` lies or would lie."""
    if name not in BUILTIN:
        raise UnknownModel(f"model {name!r} is not built in: choose one of {_names()}, or give a folder's path.")
    return models_home() / name


def get(name: str) -> Path:
    """Make the built-in model `name` unless it is there; its folder."""
    folder = builtin_folder(name)
    return BUILTIN[name](folder)


def resolve(model: str) -> Path:
    """The folder of `builtin:NAME` or of a path; raises `UnknownModel`. Makes nothing."""
    if model.startswith(PREFIX):
        name = model.removeprefix(PREFIX)
        folder = builtin_folder(name)
        if not folder.joinpath("config.json").exists():
            raise UnknownModel(f"model {model!r} is not on this machine: run `openforge model get {name}` first.")
        return folder
    folder = Path(model).expanduser().absolute()
    if not os.path.exists(folder / "config.json"):  # a name too long for a path is none either
        raise UnknownModel(
            f"model {model!r} is no checkpoint folder (there is no config.json in {folder}): give the path of a "
            f"Hugging Face folder, or one of {', '.join(PREFIX + name for name in BUILTIN)}."
        )
    return folder


def _names() -> str:
    return ", ".join(BUILTIN)
