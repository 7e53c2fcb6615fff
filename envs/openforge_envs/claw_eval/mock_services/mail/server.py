"""Mail: list, send."""

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from mock_services._base import serve


def messages(state: dict[str, Any], body: dict[str, Any]) -> dict[str, Any]:
    return {"messages": state["inbox"]}


def send(state: dict[str, Any], body: dict[str, Any]) -> dict[str, Any]:
    mail = {name: str(body[name]) for name in ("to", "subject", "body")}
    state["sent"].append(mail)
    return {"status": "sent", "mail": mail}


if __name__ == "__main__":
    serve("mail", "MAIL_FIXTURES", {"messages": messages, "send": send}, ("sent",))
