"""Runs in the agent's box, with nothing but Python: services that are ready, calls of tools, what there is to see.

claw_tools.py ready N           service N answers its health check, and its state is reset
claw_tools.py call TOOL JSON    one call; the JSON is on standard input where it is `-`; an id may follow
claw_tools.py collect           what the grader gets: /workspace/.claw/evidence.json
"""

import http.client
import json
import os
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlencode, urlsplit

HERE = Path(__file__).parent
CALLS = HERE / "calls.jsonl"
EVIDENCE = Path("/workspace/.claw/evidence.json")
TIMEOUT_S = 50.0
MOST_BYTES = 8 << 20


def request(method: str, url: str, body: Mapping[str, Any] | None = None) -> tuple[int, Any]:
    """Status and answer, which is JSON where it parses."""
    parts = urlsplit(url)
    target = parts.path or "/"
    if method == "GET" and body:
        target += f"?{urlencode(body)}"
    elif parts.query:
        target += f"?{parts.query}"
    connection = http.client.HTTPConnection(parts.hostname or "127.0.0.1", parts.port or 80, timeout=TIMEOUT_S)
    try:
        sent = None if method == "GET" else json.dumps(body or {})
        connection.request(method, target, sent, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        text = answer.read(MOST_BYTES).decode(errors="replace")
    finally:
        connection.close()
    try:
        return answer.status, json.loads(text)
    except ValueError:
        return answer.status, text


def task() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((HERE / "task.json").read_text())
    return found


def ready(number: int) -> int:
    service = task()["services"][number]
    status, _ = request(service.get("health_check_method") or "POST", service["health_check"])
    if status >= 500:
        print(f"its check answers {status}")
        return 1
    if service.get("reset_endpoint"):
        request("POST", service["reset_endpoint"])
    return 0


def call(tool: str, arguments: str, call_id: str) -> int:
    """Prints the answer. Whatever the agent did wrong is an answer too."""
    endpoints = {end["tool_name"]: end for end in task().get("tool_endpoints") or ()}
    endpoint = endpoints.get(tool)
    url = endpoint["url"] if endpoint else ""
    began = time.monotonic()
    body: Any = None
    with suppress(ValueError):
        body = json.loads(arguments)
    if endpoint is None:
        status, answer = (
            404,
            {"error": f"there is no tool {tool!r}: there are {', '.join(sorted(endpoints)) or 'none'}"},
        )
    elif not isinstance(body, dict):
        status, answer = 400, {"error": f"the arguments are no JSON object: {arguments[:200]}"}
    else:
        try:
            status, answer = request(endpoint.get("method") or "POST", url, body)
        except (OSError, http.client.HTTPException) as error:
            status, answer = 502, {"error": f"the service did not answer: {error}"}
    said = {
        "tool_use_id": call_id,
        "tool_name": tool,
        "endpoint_url": url,
        "request_body": body if isinstance(body, dict) else {},
        "response_status": status,
        "response_body": answer,
        "latency_ms": round(1000 * (time.monotonic() - began), 3),
    }
    with CALLS.open("a") as kept:
        kept.write(json.dumps(said) + "\n")
    text = answer if isinstance(answer, str) else json.dumps(answer, ensure_ascii=False)
    print(text if status < 400 else f"Error {status}: {text}")
    return 0


def collect() -> int:
    """The calls, and each service's own account of what was done with it. A service without one gives none."""
    audits = {}
    for service in task().get("services") or ():
        if not service.get("reset_endpoint"):
            continue
        status, said = request("GET", service["reset_endpoint"].rsplit("/", 1)[0] + "/audit")
        if status != 200 or not isinstance(said, dict):
            print(f"service {service['name']}: its audit answers {status}", file=sys.stderr)
            return 1
        audits[service["name"]] = said
    calls = [json.loads(line) for line in CALLS.read_text().splitlines()] if CALLS.exists() else []
    EVIDENCE.parent.mkdir(parents=True, exist_ok=True)
    draft = EVIDENCE.with_name("evidence.tmp")
    draft.write_text(json.dumps({"dispatches": calls, "audit": audits}))
    os.replace(draft, EVIDENCE)
    return 0


def main(argv: list[str]) -> int:
    match argv:
        case ["ready", number]:
            return ready(int(number))
        case ["call", tool, arguments, *ids]:
            return call(tool, sys.stdin.read() if arguments == "-" else arguments, ids[0] if ids else "")
        case ["collect"]:
            return collect()
    print(__doc__, file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
