"""What is served and how it does: models, health, metrics and a first page."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST

from sgl_omni.server.backend import Backend
from sgl_omni.server.errors import ModelNotFound
from sgl_omni.server.metrics import Metrics

SERVING = frozenset({"ready", "degraded"})


def info_router(backend: Backend, models: Sequence[str], metrics: Metrics) -> APIRouter:
    """The routes that every server has. ``models`` are the names the model answers to, its own first."""
    router = APIRouter()
    served = {"id": models[0], "object": "model", "created": int(time.time()), "owned_by": "sgl-omni"}

    @router.get("/v1/models", tags=["models"])
    async def list_models() -> dict[str, Any]:
        return {"object": "list", "data": [served]}

    @router.get("/v1/models/{model_id:path}", tags=["models"])
    async def retrieve_model(model_id: str) -> dict[str, Any]:
        """The model by its id or an alias of it."""
        if model_id not in models:
            raise ModelNotFound(f"model {model_id!r} is not served here; use {models[0]!r}", "model")
        return served

    @router.head("/health", include_in_schema=False)
    @router.get("/health", tags=["operations"])
    async def health() -> JSONResponse:
        """200 while requests are served, also by fewer instances than planned; 503 otherwise."""
        state = backend.health()
        return JSONResponse(state, 200 if state["status"] in SERVING else 503)

    @router.get("/metrics", tags=["operations"])
    async def scrape() -> Response:
        await backend.refresh()
        return Response(metrics.render(), headers={"Content-Type": CONTENT_TYPE_LATEST})

    return router


def first_page(model_id: str, routes: Sequence[str]) -> APIRouter:
    """``GET /``: what is here, as plain text."""
    router = APIRouter()
    text = "\n".join([f"sgl-omni serves {model_id}", "", *routes, ""])

    @router.head("/", include_in_schema=False)
    @router.get("/", include_in_schema=False)
    async def index() -> PlainTextResponse:
        return PlainTextResponse(text)

    return router
