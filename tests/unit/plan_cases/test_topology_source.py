"""Signatures read from source."""

from pathlib import Path

import pytest

from sgl_omni.topology.source import Missing, Opaque, Signature, SourceReader

MODULE = """
import functools
from .parts import made_there, Base as Renamed
raise RuntimeError("this module is never imported")

def plain(model_path, gpu_id=None, *, size, **more): ...
def only(a, /, b): ...
async def later(x): ...
@functools.cache
def decorated(x): ...
class Built:
    def __init__(self, model_path, gpu_id=0): ...
class Child(Built): ...
class Empty: ...
class Foreign(Renamed): ...
class Unknown(Renamed, Empty): ...
alias = plain
partial = functools.partial(plain, size=1)
if True:
    def inside(y): ...
"""


@pytest.fixture
def reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SourceReader:
    package = tmp_path / "sourced" / "deep"
    package.mkdir(parents=True)
    (tmp_path / "sourced" / "__init__.py").write_text("raise RuntimeError('never imported')")
    (package / "__init__.py").write_text("from .module import plain")
    (package / "module.py").write_text(MODULE)
    (package / "parts.py").write_text("def made_there(z): ...\nclass Base:\n    def __init__(self, w): ...\n")
    (package / "open.py").write_text("from os.path import *\n")
    (package / "broken.py").write_text("def (:\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    return SourceReader()


@pytest.mark.parametrize(
    ("name", "signature"),
    [
        ("module.plain", Signature(("model_path", "gpu_id", "size"), ("model_path", "size"), takes_any=True)),
        ("module:plain", Signature(("model_path", "gpu_id", "size"), ("model_path", "size"), takes_any=True)),
        ("plain", Signature(("model_path", "gpu_id", "size"), ("model_path", "size"), takes_any=True)),
        ("module.alias", Signature(("model_path", "gpu_id", "size"), ("model_path", "size"), takes_any=True)),
        ("module.only", Signature(("b",), ("a", "b"))),
        ("module.later", Signature(("x",), ("x",))),
        ("module.decorated", Signature(("x",), ("x",), exact=False)),
        ("module.Built", Signature(("model_path", "gpu_id"), ("model_path",))),
        ("module.Child", Signature(("model_path", "gpu_id"), ("model_path",))),
        ("module.Empty", Signature((), ())),
        ("module.Foreign", Signature(("w",), ("w",))),
        ("module.made_there", Signature(("z",), ("z",))),
        ("module.inside", Signature(("y",), ("y",))),
    ],
)
def test_signatures(reader: SourceReader, name: str, signature: Signature) -> None:
    assert reader.find(f"sourced.deep.{name}") == signature


@pytest.mark.parametrize("name", ["module.partial", "module.Unknown", "open.join"])
def test_what_source_does_not_tell(reader: SourceReader, name: str) -> None:
    assert isinstance(reader.find(f"sourced.deep.{name}"), Opaque)


@pytest.mark.parametrize("name", ["module.nothing", "nowhere.plain", "broken.plain", "module.", "module.a-b"])
def test_what_is_not_there(reader: SourceReader, name: str) -> None:
    assert isinstance(reader.find(f"sourced.deep.{name}"), Missing)
