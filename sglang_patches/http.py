"""What HTTP gets of RedKnot: API keys that stand for namespaces, and routes for documents and health."""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from fastapi import FastAPI
from fastapi.responses import JSONResponse

from sglang_patches.documents import Documents, router
from sglang_patches.launch import options_of
from sglang_patches.options import ServerConfig
from sglang_patches.requests import NAMESPACE

Scope = MutableMapping[str, Any]
_OPEN = ("/health", "/metrics")  # as with SGLang's own key


def set_up(server_args: Any, tokenizer_manager: Any, *_: Any, **__: Any) -> None:
    """Hook: before the HTTP server runs."""
    from sglang.srt.entrypoints.http_server import app

    options = options_of(server_args)
    if options is not None:
        add_to(app, options.config, Documents(options, server_args.tp_size, tokenizer_manager))


def add_to(app: FastAPI, config: ServerConfig, documents: Documents) -> None:
    """Routes, and API keys where there are some."""
    app.include_router(router(documents))
    if config.api_keys:
        app.add_middleware(ApiKeys, keys=config.api_keys)


class ApiKeys:
    """Middleware: a request's key says which namespace it belongs to; without a known one it gets no further."""

    def __init__(self, app: Callable[..., Awaitable[None]], keys: dict[str, str]) -> None:
        self._app = app
        self._keys = [(f"Bearer {key}".encode(), namespace) for key, namespace in keys.items()]

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        if scope["type"] != "lifespan" and not scope["path"].startswith(_OPEN):
            namespace = self._namespace(scope)
            if namespace is None and scope["type"] == "websocket":
                await send({"type": "websocket.close", "code": 1008})  # before it was accepted: a 403
                return
            if namespace is None:
                error = {"error": {"message": "no such API key", "type": "Unauthorized", "code": 401}}
                await JSONResponse(error, status_code=401)(scope, receive, send)
                return
            scope[NAMESPACE] = namespace
        await self._app(scope, receive, send)

    def _namespace(self, scope: Scope) -> str | None:
        """Every key is compared in full, so that the time tells nothing."""
        given = dict(scope["headers"]).get(b"authorization", b"")
        found = None
        for key, namespace in self._keys:
            if hmac.compare_digest(key, given):
                found = namespace
        return found
