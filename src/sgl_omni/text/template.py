"""A checkpoint's chat template: where it lies, and whether it can be read at all. Imports no transformers."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sgl_omni.errors import OmniError, StartupError
from sgl_omni.json_files import read_object
from sgl_omni.text import rendering

if TYPE_CHECKING:
    from jinja2.sandbox import ImmutableSandboxedEnvironment

QUESTION = ({"role": "user", "content": "?"},)
_WAIT = 120.0
"""Seconds, on a machine that has other things to do as well."""


class TemplateFailed(OmniError):
    """The checkpoint's chat template failed at a conversation that it did not refuse itself."""

    code = "chat_template"


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    text: str
    file: Path

    def check(self) -> None:
        """Raises ``StartupError`` that names file and line where the template is no Jinja."""
        from jinja2 import TemplateSyntaxError

        try:
            environment().parse(self.text)
        except TemplateSyntaxError as error:
            raise StartupError(f"{self.file}: chat_template, line {error.lineno}: {error.message}") from error

    def tried(self, variables: Mapping[str, Any]) -> str | None:
        """The text that it makes; none where it fails, or refuses. Rendered in a process of its own, within limits.

        Raises ``StartupError`` that names the file where the template runs on without end, or makes too much.
        """
        given = json.dumps({"template": self.text, "variables": variables})
        command = [sys.executable, "-m", rendering.__name__]
        try:
            done = subprocess.run(command, input=given, capture_output=True, text=True, timeout=_WAIT, check=False)
        except subprocess.TimeoutExpired as error:
            raise StartupError(f"{self.file}: chat_template made no text of a question in {_WAIT:g} s") from error
        if done.returncode in (-signal.SIGXCPU, -signal.SIGKILL):
            raise StartupError(
                f"{self.file}: chat_template does not end; it was stopped after computing for {rendering.SECONDS} s on "
                "a plain question"
            )
        if done.returncode == rendering.TOO_MUCH:
            raise StartupError(
                f"{self.file}: chat_template makes too much of a plain question: more than {rendering.CHARACTERS} "
                "characters, or more memory or steps of a loop than it may take"
            )
        if done.returncode == rendering.FAILED:
            return None
        if done.returncode:
            raise StartupError(f"{self.file}: chat_template could not be tried: {done.stderr.strip()[-300:]}")
        text: str = json.loads(done.stdout)
        return text


def environment() -> ImmutableSandboxedEnvironment:
    """Reads templates as transformers' own does."""
    from jinja2 import nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """``{% generation %}`` marks answers for training, and is nothing but what it holds."""

        tags = {"generation"}  # noqa: RUF012 - as jinja2 has it

        def parse(self, parser: Parser) -> list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    return ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])


def find_template(folder: Path) -> ChatTemplate | None:
    """The template as transformers looks for it, then that of models with media, in a file of its own.

    Raises ``StartupError`` that names the file which cannot be read, or whose field is no template.
    """
    own = folder / "chat_template.jinja"
    if own.is_file():
        try:
            return ChatTemplate(own.read_text(encoding="utf-8"), own)
        except (OSError, ValueError) as error:
            raise StartupError(f"{own} cannot be read: {error}") from error
    for name, is_needed in (("tokenizer_config.json", False), ("chat_template.json", True)):
        file = folder / name
        if not file.is_file():
            continue
        found = read_object(file, StartupError).get("chat_template")
        if found is None and not is_needed:
            continue
        if isinstance(found, list):  # several by name
            found = {each.get("name"): each.get("template") for each in found if isinstance(each, dict)}
        if isinstance(found, dict):
            found = found.get("default")
        if isinstance(found, str):
            return ChatTemplate(found, file)
        raise StartupError(f"{file} lacks the field chat_template, or it is no text")
    return None


def check_template(folder: Path) -> None:
    """Raises ``StartupError`` that names the file of a chat template that is no Jinja. There need not be one."""
    template = find_template(folder)
    if template is not None:
        template.check()


def try_template(
    folder: Path, messages: Sequence[Mapping[str, Any]] = QUESTION, *, is_needed: bool = False
) -> str | None:
    """What the folder's template makes of a conversation; none where there is no template, or it fails at that.

    Raises ``StartupError`` as ``ChatTemplate.check`` and ``ChatTemplate.tried`` do, and where there is none that
    ``is_needed``.
    """
    template = find_template(folder)
    if template is None and is_needed:
        raise StartupError(
            f"{folder} holds no chat template: neither chat_template.jinja nor chat_template.json, and none in "
            "tokenizer_config.json"
        )
    if template is None:
        return None
    template.check()
    file = folder / "tokenizer_config.json"
    settings = read_object(file, StartupError) if file.is_file() else {}
    marks = {name: _content(settings.get(name)) for name in ("bos_token", "eos_token", "pad_token", "unk_token")}
    given = {"messages": messages, "tools": None, "documents": None, "add_generation_prompt": True}
    return template.tried({**marks, **given})


def _content(token: Any) -> str:
    """Of a special token as a tokenizer's config has it: a text, or an object with one."""
    found = token.get("content") if isinstance(token, dict) else token
    return found if isinstance(found, str) else ""
