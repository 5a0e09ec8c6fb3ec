"""The HTTP application in front of a running pipeline."""

from __future__ import annotations

from collections.abc import Sequence

from fastapi import FastAPI

from sgl_omni import __version__
from sgl_omni.config.tasks import Tasks
from sgl_omni.media.source import MediaSource
from sgl_omni.server.backend import Backend
from sgl_omni.server.chat import chat_router
from sgl_omni.server.completions import completions_router
from sgl_omni.server.errors import install_error_handlers
from sgl_omni.server.info import first_page, info_router
from sgl_omni.server.metrics import Metrics
from sgl_omni.server.middleware import BodyLimit, RequestIds
from sgl_omni.server.speech import SpeechService, speech_router
from sgl_omni.server.speech_batch import batch_router
from sgl_omni.server.transcription import transcription_router
from sgl_omni.server.voices import VoiceStore, own_voices_router, voices_router

MAX_BODY_BYTES = 1 << 20
MAX_MEDIA_BODY_BYTES = 64 << 20
"""Where bodies carry recordings or pictures."""

COMMON_ROUTES = ["GET  /v1/models", "GET  /health", "GET  /metrics", "GET  /docs"]
SPEECH_ROUTES = ["POST /v1/audio/speech", "POST /v1/audio/speech/batch", "GET, POST, DELETE  /v1/audio/voices"]
CHAT_ROUTES = ["POST /v1/chat/completions"]
COMPLETION_ROUTES = ["POST /v1/completions"]
TRANSCRIPTION_ROUTES = ["POST /v1/audio/transcriptions"]
TRANSLATION_ROUTES = ["POST /v1/audio/translations"]


def create_app(
    backend: Backend,
    tasks: Tasks,
    model_id: str,
    *,
    aliases: Sequence[str] = (),
    media: MediaSource | None = None,
    max_body_bytes: int | None = None,
    request_timeout: float | None = None,
) -> FastAPI:
    """The OpenAI-compatible API of one model.

    ``media`` fetches what requests refer to, by default nothing but ``data:`` URLs. ``aliases`` are further names
    that requests may give the model; ``request_timeout`` is in seconds and None the pipeline's own limit.
    """
    app = FastAPI(title="sgl-omni", version=__version__, redoc_url=None)
    models = (model_id, *aliases)
    metrics = Metrics(backend)
    media = media or MediaSource()
    app.include_router(info_router(backend, models, metrics))
    routes = list(COMMON_ROUTES)
    if tasks.speech:
        voices = VoiceStore(tasks.speech)
        speech = SpeechService(backend, tasks.speech, models, metrics, voices, media, request_timeout)
        for router in (speech_router(speech), batch_router(speech), voices_router(tasks.speech, voices)):
            app.include_router(router)
        routes = SPEECH_ROUTES + routes
    if tasks.chat:
        app.include_router(chat_router(backend, tasks.chat, models, metrics, media, request_timeout))
        routes = CHAT_ROUTES + routes
    if tasks.chat and tasks.chat.voices and not tasks.speech:
        app.include_router(own_voices_router(tasks.chat))
        routes = [*routes, "GET  /v1/audio/voices"]
    if tasks.chat and tasks.chat.completes_text:
        app.include_router(completions_router(backend, tasks.chat, models, metrics, request_timeout))
        routes = COMPLETION_ROUTES + routes
    if tasks.transcription:
        app.include_router(transcription_router(backend, tasks.transcription, models, metrics, request_timeout))
        routes = TRANSCRIPTION_ROUTES + TRANSLATION_ROUTES * tasks.transcription.translates + routes
    app.include_router(first_page(model_id, routes))
    install_error_handlers(app)
    limit = max_body_bytes or (MAX_MEDIA_BODY_BYTES if tasks.takes_media else MAX_BODY_BYTES)
    app.add_middleware(BodyLimit, max_bytes=limit)
    app.add_middleware(RequestIds)
    return app
