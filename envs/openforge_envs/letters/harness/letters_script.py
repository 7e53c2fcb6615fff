"""Asks the model once and writes its answer to answer.txt: an agent of five lines."""

import sys
from pathlib import Path

from openai import OpenAI


def main(model: str, instruction: str) -> None:
    reply = OpenAI().chat.completions.create(model=model, messages=[{"role": "user", "content": instruction}])
    Path("answer.txt").write_text(reply.choices[0].message.content or "", encoding="utf-8", errors="replace")


if __name__ == "__main__":
    main(*sys.argv[1:])
