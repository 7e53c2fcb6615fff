"""How groups and episodes of a run are called, so that a name says where it belongs."""


def train_group(ordinal: int) -> str:
    return f"g{ordinal:06d}"


def eval_group(version: int, ordinal: int) -> str:
    """The evaluation group `ordinal` at weight version `version`."""
    return f"e{version:03d}-{ordinal:06d}"


def eval_version(group: str) -> int | None:
    """The weight version that the group evaluates; None for a training group."""
    version = group[1:].partition("-")[0]
    return int(version) if group.startswith("e") and version.isdigit() else None


def episode_of(group: str, member: int) -> str:
    return f"{group}-{member}"


def group_of(episode: str) -> str:
    """The group of an episode named by `episode_of`; an episode named otherwise is its own group."""
    return episode.rpartition("-")[0] or episode
