"""A run's curves where people already look at curves: TensorBoard, Weights & Biases, trackio, parquet.

Promises: a sink only reads, as any consumer does; every batch is one point at its version; a library is imported only
where it is written to.
"""

from openforge.cli.sinks.contract import Sink
from openforge.cli.sinks.feed import Feed
from openforge.cli.sinks.open import BadTarget, open_sink

__all__ = ["BadTarget", "Feed", "Sink", "open_sink"]
