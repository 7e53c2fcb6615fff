"""The routes: what is asked over HTTP, checked, done by `Boxes` and `Jobs`, and answered in the words of `shapes`."""

import asyncio
import base64
import binascii
import json
import time
from collections.abc import Awaitable
from contextlib import suppress
from typing import Annotated, Any, Literal, TypeVar

from fastapi import APIRouter, Depends, FastAPI, HTTPException, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi.security import APIKeyHeader
from starlette.routing import WebSocketRoute
from starlette.websockets import WebSocket

from openforge.sandbox.admission import Busy
from openforge.sandbox.contract import Box, PathMissing, PathRefused, SandboxLost, TooLarge
from openforge.sandbox_manager.api import terminal
from openforge.sandbox_manager.api.boxes import Boxes, Served, Taken
from openforge.sandbox_manager.api.connection import Connection, Delivery
from openforge.sandbox_manager.api.door import checked_key
from openforge.sandbox_manager.api.jobs import Job, Jobs, KeyReused, Wish, keeps_connections
from openforge.sandbox_manager.api.keys import ApiKey, ApiKeys
from openforge.sandbox_manager.api.registry import Registry
from openforge.sandbox_manager.api.relay import Unreachable, sandboxes_beyond
from openforge.sandbox_manager.api.shapes import (
    CreateReply,
    CreateRequest,
    ErrorReply,
    ExecRequest,
    FileEntry,
    FileList,
    FileReply,
    FileRequest,
    FileWritten,
    JobReply,
    PatchReply,
    PatchRequest,
    QueuedReply,
    ResourcesReply,
    SandboxDone,
    SandboxList,
    SandboxReply,
)

VERSION = "0.1.0"
_READY_S = 15.0  # how long a command waits for its sandbox
_HOLD_BESIDE_S = 30.0
_MOST_FILE_BYTES = 64 << 20
_SNAPSHOT_BYTES = 256 << 20
_CREATE_REPEAT_S = 10.0
_NO_ANSWER = 499  # nobody reads it: the client has gone


class Desk:
    """What the routes need. `keys` none: the API refuses everything."""

    def __init__(self, boxes: Boxes, jobs: Jobs, keys: ApiKeys, isolation: str, registry: Registry) -> None:
        self.boxes = boxes
        self.jobs = jobs
        self.keys = keys
        self.isolation = isolation
        self.registry = registry
        self.replica = registry.replica
        self.creates: dict[tuple[int, str], tuple[Served, str, Delivery]] = {}


def desk_of(request: Request) -> Desk:
    desk: Desk = request.app.state.desk
    return desk


_header = APIKeyHeader(name="X-API-Key", auto_error=False)


def key_of(request: Request, secret: Annotated[str | None, Depends(_header)]) -> ApiKey:
    return checked_key(desk_of(request).keys, secret, writes=request.method not in ("GET", "HEAD"))


Key = Annotated[ApiKey, Depends(key_of)]
The = Annotated[Desk, Depends(desk_of)]
Path = Annotated[str, Query(max_length=8192)]
_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorReply} for status in (400, 401, 403, 404, 408, 409, 413, 500, 503)
}
router = APIRouter(responses=_ERRORS)
open_router = APIRouter()


@open_router.get("/")
async def about() -> dict[str, str]:
    return {"service": "openforge sandboxes", "version": VERSION, "status": "running"}


@open_router.get("/health")
async def health() -> dict[str, str]:
    return {"status": "healthy"}


@router.get("/resources")
async def resources(desk: The, key: Key) -> ResourcesReply:
    return desk.boxes.resources(desk.isolation)


# -- sandboxes


@router.post("/sandboxes")
async def create_sandbox(body: CreateRequest, request: Request, desk: The, key: Key) -> CreateReply:
    if key.owner and body.owner not in (None, key.owner):
        raise HTTPException(403, f"owner = {body.owner!r}: this API key makes sandboxes of {key.owner!r} only")
    body = body.model_copy(update={"owner": body.owner or key.owner or None})
    served = await _created(body, request, desk, key)
    return served.created()


async def _created(body: CreateRequest, request: Request, desk: Desk, key: ApiKey) -> Served:
    """A new one, or that of the same wish whose answer was lost."""
    wish = request.headers.get("idempotency-key", "")
    known = desk.creates.get((key.number, wish or body.model_dump_json()))
    if known is not None and desk.boxes.find(known[0].id) is known[0]:
        served, text, delivery = known
        if wish and text != body.model_dump_json():
            raise HTTPException(409, f"Idempotency-Key = {wish!r} came with another request before: use a new key")
        if wish or _lost(delivery, request):
            return _remember(desk, key, wish, body, served, request)
    sandbox_id = body.sandbox_id or desk.boxes.new_id()
    try:
        served = await desk.boxes.create(sandbox_id, body)
    except Taken as taken:
        raise HTTPException(409, str(taken)) from taken
    except Busy as busy:
        raise HTTPException(503, str(busy), headers={"Retry-After": f"{busy.retry_after_s:.0f}"}) from busy
    except ValueError as wrong:
        raise HTTPException(400, str(wrong)) from wrong
    return _remember(desk, key, wish, body, served, request)


def _lost(delivery: Delivery, request: Request) -> bool:
    guess = keeps_connections(request.headers.get("user-agent", ""))
    return delivery.certainly_lost or (guess and delivery.probably_lost_within(_CREATE_REPEAT_S))


def _remember(desk: Desk, key: ApiKey, wish: str, body: CreateRequest, served: Served, request: Request) -> Served:
    text = body.model_dump_json()
    if len(desk.creates) > 4096:
        desk.creates = {known: made for known, made in desk.creates.items() if desk.boxes.find(made[0].id) is made[0]}
    delivery = _delivery_of(request)
    delivery.written()
    desk.creates[key.number, wish or text] = (served, text, delivery)
    return served


@router.get("/sandboxes")
async def list_sandboxes(
    request: Request,
    desk: The,
    key: Key,
    label: Annotated[list[str] | None, Query(description="KEY=VALUE; all of them must fit")] = None,
    owner: str | None = None,
) -> SandboxList:
    """Ours: how a client that crashed finds what it left, on every replica."""
    labels = dict(pair.partition("=")[::2] for pair in label or [])
    found = [
        served.reply(desk.replica)
        for served in desk.boxes.all()
        if key.opens(served.owner) and labels.items() <= served.request.labels.items() and owner in (None, served.owner)
    ]
    try:
        beyond = await sandboxes_beyond(desk.registry, request.scope)
    except Unreachable as error:
        raise HTTPException(503, str(error), headers={"Retry-After": "5"}) from error
    return SandboxList(sandboxes=[*found, *(SandboxReply.model_validate(one) for one in beyond)])


def _find(desk: Desk, key: ApiKey, sandbox_id: str) -> Served:
    served = desk.boxes.find(sandbox_id)
    if served is None or not key.opens(served.owner):
        raise HTTPException(404, f"Sandbox {sandbox_id} not found")
    return served


@router.get("/sandboxes/{sandbox_id}")
async def get_sandbox(sandbox_id: str, desk: The, key: Key) -> SandboxReply:
    return _find(desk, key, sandbox_id).reply(desk.replica)


@router.get("/sandboxes/{sandbox_id}/wait")
async def wait_for_sandbox(
    sandbox_id: str, request: Request, desk: The, key: Key, timeout: Annotated[float, Query(ge=0, le=86400)] = 3600
) -> SandboxReply:
    served = _find(desk, key, sandbox_id)
    if not await _within(timeout, served.settled, request):
        raise HTTPException(408, f"Sandbox {sandbox_id} was not ready within {timeout:g} s")
    reply = served.reply(desk.replica)
    if desk.boxes.find(sandbox_id) is not served:
        return reply.model_copy(update={"ready": False, "status": "not_found", "status_message": "it was deleted"})
    return reply


@router.post("/sandboxes/{sandbox_id}/heartbeat")
async def heartbeat(sandbox_id: str, desk: The, key: Key) -> SandboxDone:
    _find(desk, key, sandbox_id).heartbeat()
    return SandboxDone(status="ok", sandbox_id=sandbox_id)


@router.delete("/sandboxes/{sandbox_id}")
async def delete_sandbox(sandbox_id: str, desk: The, key: Key) -> SandboxDone:
    served = desk.boxes.find(sandbox_id)
    if served is not None and key.opens(served.owner):
        await desk.boxes.delete(sandbox_id)
    return SandboxDone(status="deleted", sandbox_id=sandbox_id)


# -- commands


async def _ready_box(served: Served, within_s: float, status: Literal[400, 404]) -> Box:
    if served.box is None:
        with suppress(TimeoutError):
            await asyncio.wait_for(served.settled.wait(), within_s)
    if served.box is None:
        why = f": {served.failure}" if served.failure else ""
        raise HTTPException(status, f"Sandbox {served.id} is not ready{why}")
    return served.box


@router.post("/sandboxes/{sandbox_id}/exec", response_model=None, responses={200: {"model": JobReply | QueuedReply}})
async def execute(
    sandbox_id: str, body: ExecRequest, request: Request, desk: The, key: Key
) -> JobReply | QueuedReply | Response:
    """Exactly once for each wish: see `jobs`. With `wait`, held for the time-out and 30 s."""
    served = _find(desk, key, sandbox_id)
    box = await _ready_box(served, _READY_S, 404)
    delivery = _delivery_of(request)
    agent = request.headers.get("user-agent", "")
    wish = Wish(
        key=request.headers.get("idempotency-key", ""),
        keeps_connections=keeps_connections(agent),
        delivery=delivery,
    )
    try:
        job = desk.jobs.submit(sandbox_id, box, body, wish)
    except KeyReused as reused:
        raise HTTPException(409, str(reused)) from reused
    hold_s = (body.timeout_seconds or 300.0) + _HOLD_BESIDE_S
    if body.wait and not await _within(hold_s, job.done, request) and await request.is_disconnected():
        return Response(status_code=_NO_ANSWER)
    delivery.written()
    return job.reply() if body.wait else QueuedReply(job_id=job.id, status="queued")


def _delivery_of(request: Request) -> Delivery:
    connection: Connection | None = request.scope.get("openforge.connection")
    one_shot = request.headers.get("connection", "").lower() == "close"
    return Delivery(None if one_shot else connection)


async def _within(timeout_s: float, event: asyncio.Event, request: Request) -> bool:
    """Whether it is set in time; also False as soon as the client has gone."""
    if event.is_set():
        return True
    waiting, leaving = asyncio.ensure_future(event.wait()), asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait({waiting, leaving}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        return event.is_set()
    finally:
        waiting.cancel()
        leaving.cancel()


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _find_job(desk: Desk, key: ApiKey, job_id: str) -> Job:
    job = desk.jobs.find(job_id)
    served = desk.boxes.find(job.sandbox) if job else None
    if job is None or (key.owner and (served is None or not key.opens(served.owner))):
        raise HTTPException(404, f"Job {job_id} not found")
    return job


@router.get("/jobs/{job_id}")
async def get_job(job_id: str, desk: The, key: Key) -> JobReply:
    return _find_job(desk, key, job_id).reply()


@router.get("/jobs/{job_id}/wait")
async def wait_for_job(
    job_id: str, request: Request, desk: The, key: Key, timeout: Annotated[float, Query(ge=0, le=86400)] = 300
) -> JobReply:
    job = _find_job(desk, key, job_id)
    await _within(timeout, job.done, request)
    return job.reply()


@router.post("/sandboxes/{sandbox_id}/apply_patch")
async def apply_patch(sandbox_id: str, body: PatchRequest, desk: The, key: Key) -> PatchReply:
    """`git apply` in /workspace; the patch is its input and nothing else."""
    box = await _ready_box(_find(desk, key, sandbox_id), _READY_S, 404)
    try:
        result = await box.exec(
            ["git", "apply", "--whitespace=nowarn", "-"],
            timeout_s=body.timeout_seconds,
            env={"GIT_CEILING_DIRECTORIES": "/"},
            stdin=body.patch.encode("utf-8", "surrogatepass"),
        )
    except SandboxLost as lost:
        raise _lost_box(lost) from lost
    error = f"Command timed out after {body.timeout_seconds:g}s" if result.timed_out else None
    if result.exit_code and error is None:
        error = result.stderr.decode(errors="replace").strip() or f"git apply ended with {result.exit_code}"
    return PatchReply(
        success=result.exit_code == 0,
        stdout=result.stdout.decode(errors="replace"),
        stderr=result.stderr.decode(errors="replace"),
        exit_code=result.exit_code,
        error=error,
    )


# -- files


T = TypeVar("T")


async def _files(work: Awaitable[T]) -> T:
    try:
        return await work
    except PathMissing as missing:
        raise HTTPException(404, str(missing)) from missing
    except TooLarge as large:
        raise HTTPException(413, str(large)) from large
    except PathRefused as refused:
        raise HTTPException(400, str(refused)) from refused
    except SandboxLost as lost:
        raise _lost_box(lost) from lost


def _lost_box(lost: SandboxLost) -> HTTPException:
    return HTTPException(404, f"The sandbox is gone: {lost}")


def _absolute(path: str) -> str:
    return path if path.startswith("/") else f"/workspace/{path}"


def _text(name: str) -> str:
    return name.encode("utf-8", "surrogateescape").decode(errors="replace")


@router.post("/sandboxes/{sandbox_id}/files")
async def upload(sandbox_id: str, body: FileRequest, desk: The, key: Key) -> FileWritten:
    served = _find(desk, key, sandbox_id)
    try:
        data = base64.b64decode(body.content, validate=True)
    except (binascii.Error, ValueError) as error:
        raise HTTPException(400, f"content is no base64: {error}") from error
    if len(data) > _MOST_FILE_BYTES:
        raise HTTPException(413, f"content has {len(data)} bytes: {_MOST_FILE_BYTES} is the most")
    box = await _ready_box(served, 0.0, 400)
    await _files(box.put(_absolute(body.path), data))
    return FileWritten(success=True, path=body.path, size=len(data))


@router.get("/sandboxes/{sandbox_id}/files")
async def download(sandbox_id: str, path: Path, desk: The, key: Key) -> FileReply:
    box = await _ready_box(_find(desk, key, sandbox_id), 0.0, 400)
    data = await _files(box.get(_absolute(path), cap=_MOST_FILE_BYTES))
    return FileReply(path=path, content=base64.b64encode(data).decode(), size=len(data))


@router.get("/sandboxes/{sandbox_id}/files/list")
async def list_files(sandbox_id: str, desk: The, key: Key, path: Path = "/workspace") -> FileList:
    box = await _ready_box(_find(desk, key, sandbox_id), 0.0, 400)
    files = await _files(box.list_files(_absolute(path)))
    return FileList(
        path=path,
        files=[
            FileEntry(
                name=_text(file.name),
                type="directory" if file.kind == "folder" else "file",
                size=file.size,
                modified=time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(file.modified)),
            )
            for file in files
        ],
    )


@router.get("/sandboxes/{sandbox_id}/snapshot", response_class=Response)
async def snapshot(
    sandbox_id: str, desk: The, key: Key, path: Annotated[list[str] | None, Query(max_length=64)] = None
) -> Response:
    """Ours: files and folders as one tar, the same bytes for the same content."""
    box = await _ready_box(_find(desk, key, sandbox_id), 0.0, 400)
    paths = [_absolute(one) for one in path or ["/workspace"]]
    tar = await _files(box.get_tar(paths, cap=_SNAPSHOT_BYTES))
    return Response(tar, media_type="application/x-tar")


# -- terminals


async def pty(websocket: WebSocket) -> None:
    """Refused before it is opened, with the status that the same refusal has over HTTP."""
    desk: Desk = websocket.app.state.desk
    try:
        key = checked_key(desk.keys, _secret_of(websocket), writes=True)
        served = _find(desk, key, websocket.path_params["sandbox_id"])
        if served.box is None:
            raise HTTPException(409, f"Sandbox {served.id} is not ready")
    except HTTPException as refused:
        await websocket.send_denial_response(JSONResponse({"detail": refused.detail}, refused.status_code))
        return
    await terminal.serve(websocket, served.box)


def _secret_of(websocket: WebSocket) -> str | None:
    """From the query, a sub-protocol `api_key.<secret>`, or the header."""
    for protocol in websocket.headers.get("sec-websocket-protocol", "").split(","):
        if protocol.strip().startswith("api_key."):
            return protocol.strip().removeprefix("api_key.")
    return websocket.query_params.get("api_key") or websocket.headers.get("x-api-key")


async def _invalid(_: Request, error: Exception) -> Response:
    """Field and reason, without what was sent: that may be nothing that JSON can hold."""
    assert isinstance(error, RequestValidationError)
    detail = [{name: one[name] for name in ("loc", "msg", "type")} for one in error.errors()]
    return Response(json.dumps({"detail": detail}), 422, media_type="application/json")


def make_app(desk: Desk | None = None) -> FastAPI:
    """Without a desk only its document is of use."""
    app = FastAPI(
        title="OpenForge sandboxes",
        version=VERSION,
        description="Compatible with clients of Orchard's sandbox API; routes and fields of ours are marked so.",
        docs_url=None,
        redoc_url=None,
    )
    app.state.desk = desk
    app.add_exception_handler(RequestValidationError, _invalid)
    app.include_router(open_router)
    app.include_router(router)
    app.router.routes.append(WebSocketRoute("/sandboxes/{sandbox_id}/exec/pty", pty))
    return app
