"""A run as a folder of parquet files: for people who analyse it, and for a bus that is to have it again."""

from openforge.cli.archive.facts import BadArchive, Record, facts_in, run_of
from openforge.cli.archive.feed import tell_all, tell_as_it_is_trained
from openforge.cli.archive.folder import Counts, NotEmpty, export

__all__ = [
    "BadArchive",
    "Counts",
    "NotEmpty",
    "Record",
    "export",
    "facts_in",
    "run_of",
    "tell_all",
    "tell_as_it_is_trained",
]
