"""A checkpoint's chat template: where it lies, and whether it can be read at all. Imports no transformers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sgl_omni.errors import OmniError, StartupError
from sgl_omni.json_files import read_object


class TemplateFailed(OmniError):
    """The checkpoint's chat template failed at a conversation that it did not refuse itself."""

    code = "chat_template"


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    text: str
    file: Path

    def check(self) -> None:
        """Raises ``StartupError`` that names file and line where the template is no Jinja."""
        from jinja2 import TemplateSyntaxError, nodes
        from jinja2.ext import Extension, loopcontrols
        from jinja2.parser import Parser
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        class Generation(Extension):
            """``{% generation %}`` marks answers for training, and is nothing but what it holds."""

            tags = {"generation"}  # noqa: RUF012 - as jinja2 has it

            def parse(self, parser: Parser) -> list[nodes.Node]:
                next(parser.stream)
                return parser.parse_statements(("name:endgeneration",), drop_needle=True)

        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
        )
        try:
            environment.parse(self.text)
        except TemplateSyntaxError as error:
            raise StartupError(f"{self.file}: chat_template, line {error.lineno}: {error.message}") from error


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
        found = _field(file)
        if isinstance(found, list):  # several by name
            found = {each.get("name"): each.get("template") for each in found if isinstance(each, dict)}
        if isinstance(found, dict):
            found = found.get("default")
        if isinstance(found, str):
            return ChatTemplate(found, file)
        if is_needed or found is not None:
            raise StartupError(f"{file} lacks the field chat_template, or it is no text")
    return None


def check_template(folder: Path) -> None:
    """Raises ``StartupError`` that names the file of a chat template that is no Jinja. There need not be one."""
    template = find_template(folder)
    if template is not None:
        template.check()


def _field(file: Path) -> Any:
    return read_object(file, StartupError).get("chat_template")
