"""Shell tasks with bystanders: files in the workspace that the task is not about.

Promises: the kinds tagged `bystanders` have two to four of them; they belong to the goal exactly as they
are, and bear no name that the task knows.
"""

import random

import msgspec

from openforge.env.contract import TaskFile, TaskInstance, generator
from openforge.env.digest import with_digest
from openforge.env.layout import FolderTask
from openforge.env.variables import Split
from openforge_envs.shell.words import lines_of_words, words

EXTENSIONS = ("txt", "md", "csv", "log")


class ShellTask:
    """A task folder, and bystanders where its tags ask for them."""

    def __init__(self, folder: FolderTask) -> None:
        self.id = folder.id
        self.tags = folder.spec.tags
        self._folder = folder

    def draw(self, seed: int, split: Split) -> TaskInstance:
        drawn = self._folder.draw(seed, split)
        if "bystanders" not in self.tags:
            return drawn
        files = self._bystanders(drawn)
        goal = {f"goal/{name}": file for name, file in files.items()}
        workspace, tests = {**drawn.workspace, **files}, {**drawn.tests, **goal}
        return with_digest(msgspec.structs.replace(drawn, workspace=workspace, tests=tests))

    def _bystanders(self, drawn: TaskInstance) -> dict[str, TaskFile]:
        rng = generator(f"{self.id}/bystanders", drawn.seed, drawn.split)
        known = " ".join([drawn.instruction, *drawn.workspace, *drawn.tests])
        free = [word for word in words(drawn.split) if word not in known]
        return {
            f"{name}.{rng.choice(EXTENSIONS)}": _text(rng, drawn.split) for name in rng.sample(free, rng.randint(2, 4))
        }


def _text(rng: random.Random, split: Split) -> TaskFile:
    return TaskFile(content=("\n".join(lines_of_words(rng, split, rng.randint(1, 4))) + "\n").encode())
