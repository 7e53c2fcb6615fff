"""Weights on disk: one folder per version and incarnation, with a hashed manifest.

Promises: a folder with its final name is complete and on disk; `check` finds any other bytes, names,
shapes or dtypes than the manifest states; versions in use are never removed.
"""

from openforge.weights.check import check, manifest_of
from openforge.weights.manifest import (
    ADAPTERS,
    BASE,
    MANIFEST,
    WEIGHTS,
    BadWeights,
    Dtype,
    FileEntry,
    Manifest,
    Probe,
    TensorEntry,
    Written,
    folder_name,
    read_manifest,
)
from openforge.weights.retention import keep_newest
from openforge.weights.write import drafted, save_tensors, write_folder, write_model, write_weights

__all__ = [
    "ADAPTERS",
    "BASE",
    "MANIFEST",
    "WEIGHTS",
    "BadWeights",
    "Dtype",
    "FileEntry",
    "Manifest",
    "Probe",
    "TensorEntry",
    "Written",
    "check",
    "drafted",
    "folder_name",
    "keep_newest",
    "manifest_of",
    "read_manifest",
    "save_tensors",
    "write_folder",
    "write_model",
    "write_weights",
]
