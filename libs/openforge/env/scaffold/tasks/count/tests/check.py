"""Does the answer's file hold the number? Prints one JSON object."""

import os

ANSWER = "/workspace/{{answer}}"


def answer() -> str:
    if os.path.islink(ANSWER) or not os.path.isfile(ANSWER):
        return ""
    with open(ANSWER, "rb") as file:
        return file.read(100).decode(errors="replace").strip()


print('{"reward": 1}' if answer() == "{{count}}" else '{"reward": 0}')
