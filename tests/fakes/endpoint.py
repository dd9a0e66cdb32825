"""An OpenAI-compatible server that misbehaves on demand, in the shape of vLLM's.

`build_app(behaviour)` gives an aiohttp app. What goes wrong is said by the `Behaviour`, for all requests, or by a
directive in a prompt, for one: `[[status 500]]` always, `[[once 503]]` the first time, `[[slow 2]]` seconds,
`[[garbage]]`, `[[reset]]` (connection closed), `[[hang]]`, `[[die]]` (calls `behaviour.on_die`), `[[say TEXT]]`,
`[[cut TEXT]]` (says it, and that a limit ended it).
Invariant: an answer depends on its prompt and parameters only, so two runs give equal bytes.

    python tests/fakes/endpoint.py [PORT]      prints the port; `latency` etc. as KEY=VALUE
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import re
import sys
import threading
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

DIRECTIVE = re.compile(r"\[\[(\w+) ?([^\]]*)\]\]")
ROLES = {"system", "user", "assistant", "tool", "developer"}


@dataclass
class Behaviour:
    """What all requests meet. May be changed while the server runs."""

    models: tuple[str, ...] = ("tiny",)
    api_key: str | None = None
    latency: float = 0.0
    max_words: int = 10_000
    max_running: int = 10_000
    busy_above: int | None = None
    busy_status: int = 429
    retry_after: int = 0
    chat_batch: bool = True
    vllm: bool = True
    health: int = 200
    frozen: bool = False
    status: int | None = None
    on_die: Callable[[], None] | None = None
    requests: int = 0
    prompts: Counter[str] = field(default_factory=Counter)
    seen: set[str] = field(default_factory=set)
    bodies: deque[Any] = field(default_factory=lambda: deque(maxlen=100))
    largest_pack: int = 0
    running: int = 0
    waiting: int = 0
    most_running: int = 0
    tokens: int = 0
    preemptions: int = 0


BEHAVIOUR: web.AppKey[Behaviour] = web.AppKey("behaviour", Behaviour)


class Refused(Exception):
    """An HTTP error for the request, as vLLM words it."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def build_app(behaviour: Behaviour | None = None) -> web.Application:
    """The whole API; the behaviour is at `app[BEHAVIOUR]`."""
    app = web.Application(client_max_size=64 << 20)
    app[BEHAVIOUR] = behaviour or Behaviour()
    app.router.add_get("/health", _health)
    app.router.add_get("/v1/models", _models)
    app.router.add_get("/metrics", _metrics)
    app.router.add_get("/version", _version)
    for url in HANDLERS:
        app.router.add_post(url, _post)
    return app


async def _health(request: web.Request) -> web.Response:
    return web.Response(status=request.app[BEHAVIOUR].health)


async def _version(request: web.Request) -> web.Response:
    return web.json_response({"version": "0.32.0-fake"})


async def _models(request: web.Request) -> web.Response:
    behaviour = request.app[BEHAVIOUR]
    if not _allowed(request, behaviour):
        return _error(401, "Unauthorized")
    owner = "vllm" if behaviour.vllm else "someone"
    return web.json_response(
        {
            "object": "list",
            "data": [
                {"id": name, "object": "model", "owned_by": owner} for name in behaviour.models
            ],
        }
    )


async def _metrics(request: web.Request) -> web.Response:
    b = request.app[BEHAVIOUR]
    if not b.vllm:
        return web.Response(status=404)
    label = f'{{model_name="{b.models[0]}"}}'
    lines = [
        f"vllm:num_requests_running{label} {b.running}.0",
        f"vllm:num_requests_waiting{label} {b.waiting}.0",
        f"vllm:num_preemptions_total{label} {b.preemptions}.0",
        f"vllm:generation_tokens_total{label} {b.tokens}.0",
        f"vllm:prompt_tokens_total{label} {b.tokens}.0",
    ]
    return web.Response(text="\n".join(lines) + "\n")


def _allowed(request: web.Request, behaviour: Behaviour) -> bool:
    key = behaviour.api_key
    return key is None or request.headers.get("Authorization") == f"Bearer {key}"


async def _post(request: web.Request) -> web.StreamResponse:
    behaviour = request.app[BEHAVIOUR]
    behaviour.requests += 1
    if not _allowed(request, behaviour):
        return _error(401, "Unauthorized")
    if behaviour.frozen:
        await asyncio.Event().wait()
    if behaviour.status is not None:
        return _error(behaviour.status, f"told to answer {behaviour.status}")
    if behaviour.busy_above is not None and behaviour.running >= behaviour.busy_above:
        return web.json_response(
            {"error": {"message": "busy"}},
            status=behaviour.busy_status,
            headers={"Retry-After": str(behaviour.retry_after)},
        )
    try:
        body = json.loads(await request.read())
        behaviour.bodies.append(body)
        _check(behaviour, body)
        return await HANDLERS[request.path](request, behaviour, body)
    except Refused as error:
        return _error(error.status, str(error))
    except json.JSONDecodeError as error:
        return _error(400, f"not JSON: {error}")


def _check(behaviour: Behaviour, body: Any) -> None:
    """vLLM's own refusals."""
    if not isinstance(body, dict):
        raise Refused(400, "the body is not an object")
    model = body.get("model", behaviour.models[0])
    if model not in behaviour.models:
        raise Refused(404, f"The model `{model}` does not exist.")
    temperature = body.get("temperature", 0)
    if isinstance(temperature, str):
        try:
            temperature = float(temperature)
        except ValueError:
            raise Refused(
                400, f"temperature: Input should be a valid number, got {temperature!r}"
            ) from None
    if temperature is not None and temperature < 0:
        raise Refused(400, f"temperature must be non-negative, got {temperature}.")
    if isinstance(body.get("max_tokens"), int) and body["max_tokens"] < 1:
        raise Refused(400, "max_tokens must be at least 1")


async def _generate(
    request: web.Request, behaviour: Behaviour, prompt: str, body: dict[str, Any]
) -> str:
    """The text for one prompt, after whatever its directives do."""
    behaviour.prompts[prompt] += 1
    if len(prompt.split()) > behaviour.max_words:
        raise Refused(400, f"This model's maximum context length is {behaviour.max_words} tokens.")
    found = DIRECTIVE.search(prompt)
    name, rest = (found[1], found[2]) if found else ("", "")
    if name == "status":
        raise Refused(int(rest), f"told to answer {rest}")
    if name == "once" and prompt not in behaviour.seen:
        behaviour.seen.add(prompt)
        raise Refused(int(rest), f"told to answer {rest} once")
    if name == "reset" and prompt not in behaviour.seen:
        behaviour.seen.add(prompt)
        if request.transport is not None:
            request.transport.abort()
        raise Refused(500, "connection closed")
    if name == "die" and behaviour.on_die is not None:
        behaviour.on_die()
        await asyncio.sleep(60)
    if name == "hang":
        await asyncio.sleep(3600)
    await _run(behaviour, float(rest) if name == "slow" else behaviour.latency)
    behaviour.tokens += 8
    if name == "garbage":
        raise web.HTTPOk(text="<html>not what you asked</html>")
    if name in ("say", "cut"):
        return rest
    shared = {
        key: value
        for key, value in sorted(body.items())
        if key not in ("messages", "prompt", "input")
    }
    return f"answer {_digest(prompt, shared)} to {prompt[:40]}"


async def _run(behaviour: Behaviour, seconds: float) -> None:
    """Hold one of `max_running` places for so long."""
    behaviour.waiting += 1
    try:
        while behaviour.running >= behaviour.max_running:
            await asyncio.sleep(0.002)
    finally:
        behaviour.waiting -= 1
    behaviour.running += 1
    behaviour.most_running = max(behaviour.most_running, behaviour.running)
    try:
        if seconds:
            await asyncio.sleep(seconds)
    finally:
        behaviour.running -= 1


def _digest(*parts: Any) -> str:
    text = json.dumps(parts, sort_keys=True)
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=6).hexdigest()


def _usage(texts: list[str]) -> dict[str, int]:
    words = sum(len(text.split()) for text in texts)
    return {
        "prompt_tokens": words,
        "completion_tokens": 8 * len(texts),
        "total_tokens": words + 8 * len(texts),
    }


def _end(prompt: str) -> str:
    return "length" if "[[cut " in prompt else "stop"


def _flat(messages: Any) -> str:
    if not isinstance(messages, list) or not messages:
        raise Refused(400, "messages must not be empty")
    parts = []
    for message in messages:
        if not isinstance(message, dict) or message.get("role") not in ROLES:
            role = message.get("role") if isinstance(message, dict) else None
            raise Refused(400, f"Unknown role: {role}")
        parts.append(f"{message['role']}: {message.get('content')}")
    return "\n".join(parts)


async def _chat(request: web.Request, behaviour: Behaviour, body: dict[str, Any]) -> web.Response:
    prompt = _flat(body.get("messages"))
    text = await _generate(request, behaviour, prompt, body)
    return _chat_response(behaviour, body, [prompt], [text])


async def _chat_pack(
    request: web.Request, behaviour: Behaviour, body: dict[str, Any]
) -> web.Response:
    if not behaviour.chat_batch:
        return _error(404, "Not Found")
    prompts = [_flat(messages) for messages in body["messages"]]
    texts = await _all(request, behaviour, prompts, body)
    return _chat_response(behaviour, body, prompts, texts)


async def _all(
    request: web.Request, behaviour: Behaviour, prompts: list[str], body: dict[str, Any]
) -> list[str]:
    behaviour.largest_pack = max(behaviour.largest_pack, len(prompts))
    return list(
        await asyncio.gather(*(_generate(request, behaviour, prompt, body) for prompt in prompts))
    )


def _chat_response(
    behaviour: Behaviour, body: dict[str, Any], prompts: list[str], texts: list[str]
) -> web.Response:
    choices = [
        {
            "index": index,
            "message": {"role": "assistant", "content": text},
            "finish_reason": _end(prompts[index]),
        }
        for index, text in enumerate(texts)
    ]
    return _answer("chat.completion", behaviour, body, prompts, {"choices": choices})


async def _completion(
    request: web.Request, behaviour: Behaviour, body: dict[str, Any]
) -> web.Response:
    prompt = body.get("prompt")
    prompts = (
        prompt
        if isinstance(prompt, list) and prompt and isinstance(prompt[0], str)
        else [str(prompt)]
    )
    texts = await _all(request, behaviour, prompts, body)
    choices = [
        {"index": index, "text": text, "finish_reason": _end(prompts[index])}
        for index, text in enumerate(texts)
    ]
    return _answer("text_completion", behaviour, body, prompts, {"choices": choices})


async def _vectors(
    request: web.Request, behaviour: Behaviour, body: dict[str, Any]
) -> web.Response:
    given = body.get("input")
    prompts: list[Any] = given if isinstance(given, list) else [given]
    if not prompts or not all(isinstance(prompt, str) for prompt in prompts):
        raise Refused(400, "input must be text")
    texts = await _all(request, behaviour, prompts, body)
    data = [
        {"index": i, "object": "embedding", "embedding": _vector(text)}
        for i, text in enumerate(texts)
    ]
    return _answer("list", behaviour, body, prompts, {"data": data})


def _vector(text: str) -> list[float]:
    return [byte / 256 for byte in hashlib.blake2b(text.encode(), digest_size=4).digest()]


async def _score(request: web.Request, behaviour: Behaviour, body: dict[str, Any]) -> web.Response:
    prompt = f"{body.get('text_1')} / {body.get('text_2')}"
    text = await _generate(request, behaviour, prompt, body)
    data = [{"index": 0, "object": "score", "score": _vector(text)[0]}]
    return _answer("list", behaviour, body, [prompt], {"data": data})


async def _rerank(request: web.Request, behaviour: Behaviour, body: dict[str, Any]) -> web.Response:
    documents = body.get("documents") or []
    texts = [
        await _generate(request, behaviour, f"{body.get('query')} / {text}", body)
        for text in documents
    ]
    results = [{"index": i, "relevance_score": _vector(text)[0]} for i, text in enumerate(texts)]
    return _answer("list", behaviour, body, texts, {"results": results})


async def _classify(
    request: web.Request, behaviour: Behaviour, body: dict[str, Any]
) -> web.Response:
    text = await _generate(request, behaviour, str(body.get("input")), body)
    data = [
        {"index": 0, "label": "yes" if _vector(text)[0] > 0.5 else "no", "probs": _vector(text)}
    ]
    return _answer("list", behaviour, body, [text], {"data": data})


async def _pooling(
    request: web.Request, behaviour: Behaviour, body: dict[str, Any]
) -> web.Response:
    text = await _generate(request, behaviour, str(body.get("input")), body)
    return _answer("list", behaviour, body, [text], {"data": [{"index": 0, "data": _vector(text)}]})


async def _responses(
    request: web.Request, behaviour: Behaviour, body: dict[str, Any]
) -> web.Response:
    text = await _generate(request, behaviour, str(body.get("input")), body)
    output = [
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}]}
    ]
    counts = _usage([text])
    usage = {"input_tokens": counts["prompt_tokens"], "output_tokens": counts["completion_tokens"]}
    return _answer("response", behaviour, body, [text], {"output": output, "usage": usage})


def _answer(
    kind: str, behaviour: Behaviour, body: dict[str, Any], prompts: list[str], own: dict[str, Any]
) -> web.Response:
    return web.json_response(
        {
            "id": f"fake-{_digest(prompts)}",
            "object": kind,
            "created": 1_700_000_000,
            "model": body.get("model", behaviour.models[0]),
            "usage": _usage(prompts),
            **own,
        }
    )


def _error(status: int, message: str) -> web.Response:
    return web.json_response(
        {"error": {"message": message, "type": "BadRequestError", "code": status}}, status=status
    )


HANDLERS: dict[str, Callable[..., Any]] = {
    "/v1/chat/completions": _chat,
    "/v1/chat/completions/batch": _chat_pack,
    "/v1/completions": _completion,
    "/v1/embeddings": _vectors,
    "/v1/score": _score,
    "/v1/rerank": _rerank,
    "/classify": _classify,
    "/pooling": _pooling,
    "/v1/responses": _responses,
}


class ThreadedEndpoint:
    """The app in a thread of this process: `with ThreadedEndpoint() as server: server.base_url`."""

    def __init__(self, behaviour: Behaviour | None = None, port: int = 0) -> None:
        self.behaviour = behaviour or Behaviour()
        self.port = port
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> ThreadedEndpoint:
        self._thread.start()
        assert self._ready.wait(10), "the fake endpoint did not start"
        return self

    def __exit__(self, *_: object) -> None:
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(10)

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        runner = web.AppRunner(
            build_app(self.behaviour),
            shutdown_timeout=0.1,
            handler_cancellation=True,
            access_log=None,
        )
        self._loop.run_until_complete(runner.setup())
        site = web.TCPSite(runner, "127.0.0.1", self.port, reuse_address=True)
        self._loop.run_until_complete(site.start())
        self.port = site._server.sockets[0].getsockname()[1]  # type: ignore[union-attr]
        self._ready.set()
        self._loop.run_forever()
        self._loop.run_until_complete(runner.cleanup())
        self._loop.close()


def main() -> None:
    """Serve until the process is ended; `[[die]]` kills it."""
    behaviour = Behaviour(on_die=lambda: os._exit(137))
    port = 0
    for argument in sys.argv[1:]:
        key, _, text = argument.partition("=")
        if not text:
            port = int(key)
        else:
            old = getattr(behaviour, key)
            kind = (
                (lambda t: tuple(t.split(",")))
                if key == "models"
                else type(old)
                if old is not None
                else str
            )
            setattr(behaviour, key, kind(text))
    server = ThreadedEndpoint(behaviour, port)
    with server:
        print(server.port, flush=True)
        threading.Event().wait()


if __name__ == "__main__":
    main()
