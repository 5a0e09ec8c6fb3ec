"""The HTTP application in front of a running pipeline."""

from __future__ import annotations

from collections.abc import Sequence

from fastapi import FastAPI

from sgl_omni import __version__
from sgl_omni.config.tasks import SpeechTask
from sgl_omni.server.backend import Backend
from sgl_omni.server.errors import install_error_handlers
from sgl_omni.server.info import first_page, info_router
from sgl_omni.server.metrics import Metrics
from sgl_omni.server.middleware import BodyLimit, RequestIds
from sgl_omni.server.speech import speech_router

MAX_BODY_BYTES = 1 << 20

COMMON_ROUTES = ["GET  /v1/models", "GET  /health", "GET  /metrics", "GET  /docs"]
SPEECH_ROUTES = ["POST /v1/audio/speech", "GET  /v1/audio/voices"]


def create_app(
    backend: Backend,
    speech: SpeechTask | None,
    model_id: str,
    *,
    aliases: Sequence[str] = (),
    max_body_bytes: int = MAX_BODY_BYTES,
    request_timeout: float | None = None,
) -> FastAPI:
    """The OpenAI-compatible API of one model.

    ``aliases`` are further names that requests may give the model; ``request_timeout`` is in seconds and
    None the pipeline's own limit. A pipeline without a task has no route for it.
    """
    app = FastAPI(title="sgl-omni", version=__version__, redoc_url=None)
    models = (model_id, *aliases)
    metrics = Metrics(backend)
    app.include_router(info_router(backend, models, metrics))
    if speech:
        app.include_router(speech_router(backend, speech, models, metrics, request_timeout))
    app.include_router(first_page(model_id, [*(SPEECH_ROUTES if speech else []), *COMMON_ROUTES]))
    install_error_handlers(app)
    app.add_middleware(BodyLimit, max_bytes=max_body_bytes)
    app.add_middleware(RequestIds)
    return app
