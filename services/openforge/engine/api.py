"""The engine's wire over HTTP: the part of vLLM's that OpenForge uses, with the same shapes.

Promises: unknown parameters are refused, never ignored; a client that goes away ends its request; an answer's version
spans cover all its tokens.
"""

import asyncio
import secrets
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
from fastapi import FastAPI, Request, Response
from fastapi.responses import StreamingResponse

from openforge.engine.embedded import EmbeddedEngine, NotServing, Refused
from openforge.engine.routed import written
from openforge.engine.worker import Call, PauseMode, WorkerDied
from openforge.service import log
from openforge.weights import BadWeights
from openforge.wire.generate import (
    Choice,
    GenerateRequest,
    GenerateResponse,
    Logprobs,
    PromptLogprob,
    PromptTokensDetails,
    SamplingParams,
    TokenLogprob,
    Usage,
    WeightInfo,
)

ID_PREFIX = "generate-tokens-"
_PAUSE_MODES: dict[str, PauseMode] = {"keep": "keep", "abort": "abort", "wait": "wait"}


class UnknownModel(Refused):
    """The model of the request is not the one that is served."""


def make_app(engine: EmbeddedEngine) -> FastAPI:
    app = FastAPI(openapi_url=None)
    _add_generation(app, engine)
    _add_information(app, engine)
    _add_control(app, engine)
    _add_weights(app, engine)
    return app


def _add_generation(app: FastAPI, engine: EmbeddedEngine) -> None:
    @app.post("/inference/v1/generate")
    async def generate(http: Request) -> Response:
        try:
            request = decode_generate(await http.body(), engine.options.model_name)
            engine_id = ID_PREFIX + (request.request_id or secrets.token_hex(8))
            call = engine.submit(engine_id, request.token_ids, request.sampling_params)
        except UnknownModel as error:
            return _error(404, str(error))
        except Refused as error:
            return _error(400, str(error))
        except (NotServing, WorkerDied) as error:
            return _error(503, str(error))
        if request.stream:
            return StreamingResponse(_stream(engine, call, request), media_type="text/event-stream")
        return await _whole(engine, call, request, http)


def _add_information(app: FastAPI, engine: EmbeddedEngine) -> None:
    @app.get("/health")
    @app.get("/ping")
    async def health() -> Response:
        return Response() if engine.worker and not engine.worker.died.done() else _error(503, "no weights are served")

    @app.get("/v1/models")
    async def models() -> Response:
        try:
            length, root = engine.context, str(engine.serving.folder)
        except NotServing as error:
            return _error(503, str(error))
        name = engine.options.model_name
        return _json(
            {"object": "list", "data": [{"id": name, "object": "model", "root": root, "max_model_len": length}]}
        )

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(metrics_text(engine), media_type="text/plain; version=0.0.4")


def _add_control(app: FastAPI, engine: EmbeddedEngine) -> None:
    @app.post("/pause")
    async def pause(mode: str = "abort", clear_cache: bool = True) -> Response:
        if mode not in _PAUSE_MODES:
            return _error(400, f"mode = {mode!r}: use keep, abort or wait")
        if not clear_cache:
            return _error(400, "clear_cache = false: this engine never keeps what other weights computed, leave it out")
        return await _when_serving(engine, lambda: engine.running.pause(_PAUSE_MODES[mode]), {"status": "paused"})

    @app.post("/resume")
    async def resume() -> Response:
        return await _when_serving(engine, lambda: engine.running.resume(), {"status": "resumed"})

    @app.get("/is_paused")
    async def is_paused() -> Response:
        return _json({"is_paused": engine.worker is not None and engine.worker.is_paused})

    @app.post("/reset_prefix_cache")
    async def reset_prefix_cache() -> Response:
        forget = lambda: engine.running.ask(lambda batch: batch.forget_prefixes())  # noqa: E731
        return await _when_serving(engine, forget, {"success": True})

    @app.post("/abort_requests")
    async def abort_requests(http: Request) -> Response:
        body = _body(await http.body())
        ids = set(body["request_ids"]) if body.get("request_ids") else None
        if engine.worker is None:
            return _json({"aborted": 0})
        aborted = await engine.worker.abort(
            lambda request: ids is None or request.id in ids or request.id.removeprefix(ID_PREFIX) in ids
        )
        return _json({"aborted": aborted})


def _add_weights(app: FastAPI, engine: EmbeddedEngine) -> None:
    @app.get("/weight_info")
    async def weight_info() -> Response:
        try:
            return _json(WeightInfo(weight_version=engine.version))
        except NotServing as error:
            return _error(503, str(error))

    @app.post("/update_weight_version")
    async def update_weight_version(http: Request) -> Response:
        version = str(_body(await http.body()).get("new_version", ""))
        if not version:
            return _error(400, "new_version is missing: send the version's name")
        rename = lambda: engine.running.ask(lambda batch: batch.rename(version))  # noqa: E731
        return await _when_serving(engine, rename, {"success": True, "weight_version": version})

    @app.post("/collective_rpc")
    async def collective_rpc(http: Request) -> Response:
        body = _body(await http.body())
        path = (body.get("kwargs") or {}).get("weights_path")
        if body.get("method") != "reload_weights" or not path:
            return _error(400, "this engine's only method is reload_weights with kwargs.weights_path")
        try:
            await engine.load(Path(path))
        except BadWeights as error:
            log.error("weights refused", path=path, why=str(error))
            return _error(500, str(error))
        return _json({"results": [None]})


def decode_generate(body: bytes, model_name: str) -> GenerateRequest:
    """Raises `Refused` on anything that this engine would not honour."""
    try:
        raw = msgspec.json.decode(body)
        request = msgspec.convert(raw, GenerateRequest)
    except msgspec.MsgspecError as error:
        raise Refused(f"the request cannot be read: {error}") from error
    _refuse_unknown(raw, GenerateRequest, "the request")
    _refuse_unknown(raw["sampling_params"], SamplingParams, "sampling_params")
    if request.model and request.model != model_name:
        raise UnknownModel(f"model {request.model!r} is not served here: use {model_name!r}")
    return request


def _refuse_unknown(raw: dict[str, Any], struct: type[msgspec.Struct], where: str) -> None:
    known = {field.name for field in msgspec.structs.fields(struct)}
    if unknown := sorted(raw.keys() - known):
        raise Refused(f"{where} has {', '.join(unknown)}: this engine knows {', '.join(sorted(known))}")


async def _whole(engine: EmbeddedEngine, call: Call, request: GenerateRequest, http: Request) -> Response:
    gone = asyncio.create_task(_disconnected(http))
    try:
        while not call.ended:
            news = asyncio.create_task(call.more())
            await asyncio.wait((news, gone), return_when=asyncio.FIRST_COMPLETED)
            if not news.done():
                news.cancel()
                return Response(status_code=499)
        if call.request.ended is None:
            return _error(503, "the engine's computing thread has ended")
        answer = _answer(engine, call, request, 0, call.count)
        answer.prompt_logprobs = await _prompt_logprobs(engine, request)
        return _json(answer)
    finally:
        gone.cancel()
        if not call.ended:
            engine.running.let_go(call)


async def _disconnected(http: Request) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass


async def _stream(engine: EmbeddedEngine, call: Call, request: GenerateRequest) -> AsyncIterator[bytes]:
    sent = 0
    try:
        while not call.ended:
            await call.more()
            if call.ended and call.request.ended is None:
                return  # the computation died: an answer without end
            upto = call.count
            if upto > sent or call.ended:
                yield b"data: " + msgspec.json.encode(_answer(engine, call, request, sent, upto)) + b"\n\n"
            sent = upto
        yield b"data: [DONE]\n\n"
    finally:
        if not call.ended:
            engine.running.let_go(call)


def _answer(engine: EmbeddedEngine, call: Call, asked: GenerateRequest, start: int, end: int) -> GenerateResponse:
    """Tokens [start, end) of the answer; with the last of them how it ended and where they came from."""
    request = call.request
    pairs = zip(request.sampled[start:end], request.logprobs[start:end], strict=True)
    choice = Choice(
        token_ids=request.sampled[start:end],
        logprobs=Logprobs(content=[TokenLogprob(token_id=token, logprob=logprob) for token, logprob in pairs]),
    )
    response = GenerateResponse(request_id=request.id, model=engine.options.model_name, choices=[choice])
    if start == 0 and asked.return_token_ids:
        response.prompt_token_ids = request.prompt
    if call.ended and request.ended is not None:
        choice.finish_reason, choice.stop_reason = request.ended.finish, request.ended.reason
        choice.weight_versions = request.spans
        if (chosen := request.routed.first()) is not None:
            choice.routed_experts = written(chosen[request.params.routed_experts_prompt_start :])
        response.usage = Usage(
            prompt_tokens=len(request.prompt),
            completion_tokens=end,
            total_tokens=len(request.prompt) + end,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=request.cached_tokens),
        )
    return response


async def _prompt_logprobs(
    engine: EmbeddedEngine, request: GenerateRequest
) -> list[dict[str, PromptLogprob] | None] | None:
    ids = request.token_ids
    if request.sampling_params.prompt_logprobs is None:
        return None
    if len(ids) == 1:
        return [None]
    scores = await engine.running.ask(lambda batch: batch.score(ids[:1], ids[1:]))
    return [None, *({str(i): PromptLogprob(logprob=score)} for i, score in zip(ids[1:], scores, strict=True))]


async def _when_serving(engine: EmbeddedEngine, do: Any, answer: dict[str, Any]) -> Response:
    try:
        await do()
    except NotServing as error:
        return _error(503, str(error))
    return _json(answer)


def metrics_text(engine: EmbeddedEngine) -> str:
    """Prometheus text with vLLM's names."""
    batch = engine.worker.batch if engine.worker else None
    label = f'{{model_name="{engine.options.model_name}"}}'
    counters = batch.counters if batch else None
    numbers = {
        "gauge vllm:num_requests_running": batch.running if batch else 0,
        "gauge vllm:num_requests_waiting": batch.waiting if batch else 0,
        "gauge vllm:kv_cache_usage_perc": batch.kv_use if batch else 0.0,
        "counter vllm:num_preemptions_total": counters.preemptions if counters else 0,
        "counter vllm:prefix_cache_queries_total": counters.prefix_queries if counters else 0,
        "counter vllm:prefix_cache_hits_total": counters.prefix_hits if counters else 0,
        "counter vllm:prompt_tokens_total": counters.prompt_tokens if counters else 0,
        "counter vllm:generation_tokens_total": counters.generation_tokens if counters else 0,
    }
    lines = []
    for name, value in numbers.items():
        kind, metric = name.split(" ")
        lines += [f"# TYPE {metric} {kind}", f"{metric}{label} {value}"]
    return "\n".join(lines) + "\n"


def _body(data: bytes) -> dict[str, Any]:
    try:
        return msgspec.json.decode(data or b"{}", type=dict[str, Any])
    except msgspec.DecodeError:
        return {}


def _json(data: object) -> Response:
    return Response(msgspec.json.encode(data), media_type="application/json")


def _error(status: int, message: str) -> Response:
    error = {"message": message, "type": "BadRequestError" if status < 500 else "EngineError", "code": status}
    return Response(msgspec.json.encode({"error": error}), status_code=status, media_type="application/json")
