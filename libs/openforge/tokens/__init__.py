"""From recorded turns to training sequences, token for token."""

from openforge.tokens.merge import Merged, merge
from openforge.tokens.rebuild import Conversation, RebuiltTurn, RecordBroken, rebuild

__all__ = ["Conversation", "Merged", "RebuiltTurn", "RecordBroken", "merge", "rebuild"]
