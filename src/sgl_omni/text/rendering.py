"""Fills in a chat template once, as a program of its own, which can be ended: ``python -m sgl_omni.text.rendering``.

Reads ``{"template", "variables"}`` as JSON and writes the text as JSON. A template is a program, whoever wrote it, and
may run without end: only a process can be held to a limit of time and of memory, whatever it does.
"""

from __future__ import annotations

import json
import resource
import sys
from collections.abc import Mapping
from datetime import datetime
from typing import Any

SECONDS, BYTES, CHARACTERS = 5, 2 << 30, 1 << 20
"""Of a CPU, of memory, and of text. A plain question takes a thousandth of a second and a few thousand characters."""
FAILED, TOO_MUCH = 3, 4
"""How the process ends where the template raises something, and where it asks for too much."""


def bound() -> None:
    """A signal ends this process when it has computed for ``SECONDS``; what wants more than ``BYTES`` fails."""
    for which, most in ((resource.RLIMIT_CPU, SECONDS), (resource.RLIMIT_AS, BYTES)):
        allowed = resource.getrlimit(which)[1]
        most = most if allowed == resource.RLIM_INFINITY else min(most, allowed)
        resource.setrlimit(which, (most, most))


def rendered(template: str, variables: Mapping[str, Any]) -> str:
    """As transformers does it. Raises what the template raises."""
    from jinja2 import TemplateError

    from sgl_omni.text.template import environment

    def refuse(message: str) -> None:
        raise TemplateError(message)

    def to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)

    made = environment()
    made.filters["tojson"] = to_json
    made.globals["raise_exception"] = refuse
    made.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return made.from_string(template).render(**variables)


def main() -> int:
    bound()
    asked = json.load(sys.stdin)
    try:
        text = rendered(asked["template"], asked["variables"])
    except (MemoryError, OverflowError):  # the second is Jinja's own limit of a range
        return TOO_MUCH
    except Exception:  # noqa: BLE001 - a template may raise anything, and whoever renders it for requests tells what
        return FAILED
    if len(text) > CHARACTERS:
        return TOO_MUCH
    json.dump(text, sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main())
