"""Is /workspace as it should be? Prints {"reward": 1} or {"reward": 0} and what differs first.

/tests/goal holds the files of the goal, /tests/directories names directories that need no file in them,
/tests/scripts holds shell scripts of which only the words count, not how they are quoted. Compared are
all names, all contents (a newline at the very end apart) and all executable bits, of the whole workspace.
"""

import os
import stat
import sys

Entry = tuple[str, bytes]
TESTS = os.path.dirname(os.path.abspath(__file__))
DIRECTORY: Entry = ("directory", b"")
LARGEST_BYTES = 1 << 20


def tree(root: str) -> dict[str, Entry]:
    """Every path below `root` with its kind and content."""
    entries: dict[str, Entry] = {}
    for folder, directories, files in os.walk(root):
        for name in directories + files:
            path = os.path.join(folder, name)
            entries[os.path.relpath(path, root)] = entry(path)
    return entries


def entry(path: str) -> Entry:
    status = os.lstat(path)
    if stat.S_ISDIR(status.st_mode):
        return DIRECTORY
    if not stat.S_ISREG(status.st_mode):
        return ("neither file nor directory", b"")
    kind = "executable" if status.st_mode & 0o100 else "file"
    try:
        with open(path, "rb") as file:
            return (kind, file.read(LARGEST_BYTES).removesuffix(b"\n"))
    except PermissionError:
        return ("unreadable", b"")


def with_parents(entries: dict[str, Entry]) -> dict[str, Entry]:
    """The entries and all directories that they lie in."""
    whole = dict(entries)
    for path in entries:
        while path := os.path.dirname(path):
            whole[path] = DIRECTORY
    return whole


def named_directories() -> list[str]:
    file = os.path.join(TESTS, "directories")
    if not os.path.isfile(file):
        return []
    with open(file) as lines:
        return lines.read().split()


def words_of_script(entry: Entry) -> Entry:
    import shlex

    kind, text = entry
    try:
        lines = [" ".join(shlex.split(line)) for line in text.decode().splitlines()]
    except ValueError:  # quotes without an end, or no text at all
        return entry
    return (kind, "\n".join(line for line in lines if line).encode())


def first_difference(workspace: str) -> str:
    """What is not as it should be, or nothing."""
    scripts = tree(os.path.join(TESTS, "scripts"))
    goal = {**tree(os.path.join(TESTS, "goal")), **scripts, **dict.fromkeys(named_directories(), DIRECTORY)}
    goal = with_parents(goal)
    found = tree(workspace)
    for name in scripts.keys() & found.keys():
        goal[name], found[name] = words_of_script(goal[name]), words_of_script(found[name])
    for name in sorted(goal.keys() | found.keys()):
        if name not in found:
            return f"{name} is missing"
        if name not in goal:
            return f"{name} should not be there"
        if found[name] != goal[name]:
            return f"{name} is not as it should be"
    return ""


def main(workspace: str) -> None:
    import json

    difference = first_difference(workspace)
    print(json.dumps({"reward": 0 if difference else 1, "difference": difference[:200]}))


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "/workspace")
