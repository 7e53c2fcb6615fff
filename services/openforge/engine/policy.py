"""Which of the published weights an engine should serve next. A fold without any I/O.

Promises: versions only go forward; what was refused once is not tried again; if the newest is refused and nothing
is served yet, the next newest is due.
"""

from openforge.protos import PolicyPublished


class Newest:
    """The publications of one run, what is served of them, and what turned out bad."""

    def __init__(self) -> None:
        self.served: PolicyPublished | None = None
        self._candidates: dict[str, PolicyPublished] = {}
        self._refused: set[str] = set()

    def apply(self, published: PolicyPublished) -> None:
        if published.digest not in self._refused and self._is_newer(published):
            self._candidates[published.digest] = published

    def due(self) -> PolicyPublished | None:
        """What to load now, if anything."""
        return max(self._candidates.values(), key=_age, default=None)

    def serves(self, published: PolicyPublished) -> None:
        self.served = published
        self._candidates = {digest: other for digest, other in self._candidates.items() if self._is_newer(other)}

    def refuses(self, published: PolicyPublished) -> None:
        self._refused.add(published.digest)
        self._candidates.pop(published.digest, None)

    def _is_newer(self, published: PolicyPublished) -> bool:
        return self.served is None or _age(published) > _age(self.served)


def _age(published: PolicyPublished) -> tuple[int, int]:
    return published.version, published.incarnation
