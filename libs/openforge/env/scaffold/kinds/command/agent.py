"""A small agent that needs nothing but Python: one shell command a turn, until it gives none.

It runs inside the sandbox. LLM_BASE_URL, LLM_API_KEY and LLM_MODEL say where the model is.
"""

import json
import os
import re
import subprocess
import sys
import urllib.request

SYSTEM = "You work in a Linux shell. Answer with one ```sh block that holds the next command; when done, with none."
BLOCK = re.compile(r"```(?:sh|bash)?[ \t]*\n(.*?)(?:\n?```|\Z)", re.DOTALL)


def ask(messages: list[dict[str, str]]) -> str:
    body = {"model": os.environ["LLM_MODEL"], "messages": messages}
    request = urllib.request.Request(
        os.environ["LLM_BASE_URL"] + "/chat/completions",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json", "Authorization": "Bearer " + os.environ["LLM_API_KEY"]},
    )
    with urllib.request.urlopen(request, timeout=600) as response:
        return str(json.load(response)["choices"][0]["message"]["content"] or "")


def run(command: str) -> str:
    try:
        done = subprocess.run(["sh", "-c", command], capture_output=True, timeout=30, check=False)
    except subprocess.TimeoutExpired:
        return "Timed out after 30 seconds."
    return f"Exit code {done.returncode}\n{(done.stdout + done.stderr).decode(errors='replace')[-2000:]}"


def main(instruction: str) -> None:
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": instruction}]
    for _ in range(int(os.environ["AGENT_TURNS"])):
        reply = ask(messages)
        command = BLOCK.search(reply)
        if command is None:
            return
        messages += [{"role": "assistant", "content": reply}, {"role": "user", "content": run(command[1])}]


if __name__ == "__main__":
    main(sys.argv[1])
