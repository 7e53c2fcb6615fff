"""Prints as reward which share of the first 16 characters of the answer is within a class such as `A-Za-z`.

An answer that is shorter has the missing characters wrong; bytes that are no text are no character of a class.
"""

import json
import re
import sys

LENGTH = 16


def share(answer: bytes, letters: str) -> float:
    first = answer.decode("utf-8", errors="replace")[:LENGTH]
    return len(re.findall(f"[{letters}]", first)) / LENGTH


def main(letters: str, path: str = "/workspace/answer.txt") -> None:
    try:
        with open(path, "rb") as file:
            answer = file.read(4 * LENGTH)
    except OSError:
        answer = b""
    print(json.dumps({"reward": share(answer, letters)}))


if __name__ == "__main__":
    main(*sys.argv[1:])
