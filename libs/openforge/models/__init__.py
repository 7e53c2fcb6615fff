"""Model folders: the small models that a machine without a network hub can make, and how to find one.

Promises: a folder that exists is complete (made under another name, then renamed), and a model
that cannot be found is answered with what there is and the command that makes it.
"""

from openforge.models.byte_llama import tiny
from openforge.models.find import UnknownModel, builtin_folder, get, resolve
from openforge.models.smollm2 import smollm2_135m
from openforge.runs.model import models_home

__all__ = ["UnknownModel", "builtin_folder", "get", "models_home", "resolve", "smollm2_135m", "tiny"]
