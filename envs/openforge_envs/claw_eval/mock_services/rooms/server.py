"""Meeting rooms: list, book, cancel."""

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from mock_services._base import Wrong, serve


def free(state: dict[str, Any], body: dict[str, Any]) -> dict[str, Any]:
    taken = {one["room"] for one in state["bookings"] if (one["date"], one["time"]) == (body["date"], body["time"])}
    return {"rooms": [room for room in state["rooms"] if room["name"] not in taken]}


def book(state: dict[str, Any], body: dict[str, Any]) -> dict[str, Any]:
    booking = {name: str(body[name]) for name in ("room", "date", "time", "title")}
    if booking["room"] not in [room["name"] for room in free(state, body)["rooms"]]:
        raise Wrong(f"{booking['room']} is not free then")
    state["bookings"].append(booking)
    state["booked"].append(booking)
    return {"status": "booked", "booking": booking}


def cancel(state: dict[str, Any], body: dict[str, Any]) -> dict[str, Any]:
    gone = [one for one in state["bookings"] if one["title"] == body["title"]]
    state["bookings"] = [one for one in state["bookings"] if one not in gone]
    state["cancelled"] += gone
    return {"status": "cancelled", "bookings": gone}


if __name__ == "__main__":
    serve("rooms", "ROOMS_FIXTURES", {"free": free, "book": book, "cancel": cancel}, ("booked", "cancelled"))
