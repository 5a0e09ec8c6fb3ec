"""The description of an arena: what is put where, and what is refused as another model's or as changed."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sgl_omni.errors import WeightShareError
from sgl_omni.gpu.weights.arena import Arena, views
from sgl_omni.gpu.weights.manifest import ALIGNMENT, Manifest, _digest

DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn)


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def small(**changes: Any) -> Manifest:
    wanted = {"table": meta(10, 3), "norm": meta(3, dtype=torch.bfloat16), "state": meta(4)}
    facts = {"architecture": "Tiny", "fingerprint": "f1", "private": ("stat*",), **changes}
    return Manifest.lay_out(facts.pop("wanted", wanted), **facts)


def test_tensors_lie_one_after_another_on_boundaries() -> None:
    table, norm, state = small().entries
    assert (table.offset, table.num_bytes) == (0, 120)
    assert (norm.offset, norm.num_bytes, norm.dtype, norm.strides) == (256, 6, "bfloat16", (1,))
    assert (state.offset, state.private, norm.private) == (512, True, False)
    assert small().size == 768 and small().shared_bytes == 126


@given(
    st.lists(
        st.tuples(
            st.sampled_from(DTYPES), st.lists(st.integers(0, 7), max_size=3).map(tuple), st.booleans(), st.booleans()
        ),
        min_size=1,
        max_size=12,
    )
)
def test_any_tensors_survive_the_round_trip_and_overlap_nowhere(
    tensors: list[tuple[torch.dtype, tuple[int, ...], bool, bool]],
) -> None:
    wanted = {"first": meta(1)}
    for i, (dtype, shape, transposed, _) in enumerate(tensors):
        tensor = meta(*shape, dtype=dtype)
        wanted[f"t{i}"] = tensor.mT if transposed and tensor.dim() > 1 else tensor
    private = [f"t{i}" for i, row in enumerate(tensors) if row[3]]
    manifest = Manifest.lay_out(wanted, architecture="A", fingerprint="f", private=private)
    assert Manifest.from_bytes(manifest.to_bytes()) == manifest
    memory = torch.zeros(manifest.size, dtype=torch.uint8)
    found = views(manifest, memory)
    for name, tensor in found.items():
        assert (tensor.shape, tensor.stride(), tensor.dtype) == (
            wanted[name].shape,
            wanted[name].stride(),
            wanted[name].dtype,
        )
        assert tensor.data_ptr() % ALIGNMENT == memory.data_ptr() % ALIGNMENT or not tensor.numel()
    for i, tensor in enumerate(found.values()):
        tensor.fill_(i % 2 if tensor.dtype == torch.bool else i + 1)
    for i, tensor in enumerate(found.values()):
        assert (tensor.to(torch.complex64) == (i % 2 if tensor.dtype == torch.bool else i + 1)).all()


def test_a_tensor_with_gaps_cannot_be_shared() -> None:
    with pytest.raises(WeightShareError, match=r"'slice' \(strides \(8, 1\)\) does not fill one run of memory"):
        small(wanted={"slice": meta(4, 8)[:, :3], "state": meta(1)})
    with pytest.raises(WeightShareError, match="'broadcast'"):
        small(wanted={"broadcast": meta(1, 8).expand(4, 8), "state": meta(1)})


def test_a_policy_that_names_nothing_is_a_mistake() -> None:
    with pytest.raises(WeightShareError, match=r"share policy names \['kv_\*'\]"):
        small(private=("kv_*", "state"))


def test_a_model_without_tensors_has_nothing_to_share() -> None:
    with pytest.raises(WeightShareError, match="there is no tensor to share"):
        small(wanted={}, private=())


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"architecture": "Other"}, "weights found are those of Other, but Tiny was to be loaded"),
        ({"fingerprint": "f2"}, "the checkpoint was changed after its weights had been loaded"),
        ({"private": ()}, "different: state"),
        ({"wanted": {"table": meta(10, 3), "state": meta(4)}}, "missing: norm; different: state"),
        (
            {"wanted": {"table": meta(10, 3), "norm": meta(3, dtype=torch.float16), "state": meta(4)}},
            "different: norm",
        ),
        (
            {"wanted": {"table": meta(3, 10), "norm": meta(3, dtype=torch.bfloat16), "state": meta(4)}},
            "different: table",
        ),
        (
            {
                "wanted": {
                    "table": meta(10, 3),
                    "norm": meta(3, dtype=torch.bfloat16),
                    "state": meta(4),
                    "more": meta(1),
                }
            },
            "unknown: more",
        ),
    ],
)
def test_weights_of_another_model_are_refused_by_what_differs(other: dict[str, Any], message: str) -> None:
    with pytest.raises(WeightShareError, match=message):
        small().check_same(small(**other))


def change(path: tuple[str | int, ...], value: object) -> Callable[[dict[str, Any]], None]:
    def apply(fields: dict[str, Any]) -> None:
        for key in path[:-1]:
            fields = fields[key]  # type: ignore[index]
        fields[path[-1]] = value  # type: ignore[index]

    return apply


TAMPERED = [
    (change(("fingerprint",), "f2"), None),
    (change(("size",), 10**9), None),
    (change(("entries", 0, "offset"), 128), "puts 'table' where it cannot be"),
    (change(("entries", 1, "offset"), 0), "puts 'norm' where it cannot be"),
    (change(("entries", 2, "shape"), [4000]), "puts 'state' where it cannot be"),
    (change(("entries", 0, "strides"), [1, 1]), "'table'.* does not fill one run"),
    (change(("entries", 0, "shape"), [-10, 3]), "puts 'table' where it cannot be"),
    (change(("entries", 0, "dtype"), "float7"), "data type 'float7'"),
    (change(("entries", 0, "dtype"), "load"), "data type 'load'"),
    (change(("size",), "large"), "cannot be read"),
    (change(("entries", 0, "more"), 1), "cannot be read"),
    (change(("format",), 2), "another version"),
]


@pytest.mark.parametrize(("apply", "message"), TAMPERED)
def test_a_changed_manifest_is_refused(apply: Callable[[dict[str, Any]], None], message: str | None) -> None:
    """As it is by its hash; and where whoever changed it made a new hash, by what it says."""
    fields = json.loads(small().to_bytes())
    apply(fields)
    whole = "another version" if fields["format"] != 1 else "was changed|cannot be read|data type"
    with pytest.raises(WeightShareError, match=whole):
        Manifest.from_bytes(json.dumps(fields).encode())
    if message is None:
        return
    del fields["digest"]
    fields["digest"] = _digest(fields)
    with pytest.raises(WeightShareError, match=message):
        Manifest.from_bytes(json.dumps(fields).encode())


@pytest.mark.parametrize("data", [b"", b"{}", b"[1]", b"null", b"\xff\xfe", b'{"digest": 1, "format": 1}'])
def test_what_is_no_manifest_is_refused(data: bytes) -> None:
    with pytest.raises(WeightShareError, match="cannot be read"):
        Manifest.from_bytes(data)


def test_private_tensors_are_copies_and_shared_ones_are_not() -> None:
    manifest = small()
    memory = torch.zeros(manifest.size, dtype=torch.uint8)
    views(manifest, memory)["state"].copy_(torch.tensor([1.0, 2.0, 3.0, 4.0]))
    one, other = Arena(manifest, memory), Arena(manifest, memory)
    mine, theirs = one.tensors(), other.tensors()
    mine["state"].zero_()
    assert theirs["state"].tolist() == [1, 2, 3, 4] and one.tensors()["state"].tolist() == [1, 2, 3, 4]
    assert mine["table"].data_ptr() == theirs["table"].data_ptr() == memory.data_ptr()
    one.verify(mine)


def test_a_tensor_that_moved_is_found() -> None:
    manifest = small()
    memory = torch.zeros(manifest.size, dtype=torch.uint8)
    arena = Arena(manifest, memory)
    good = arena.tensors()
    for changes, message in (
        ({"table": good["table"].clone()}, "Tiny: table is no longer in the shared memory"),
        ({"table": good["table"].t()}, "table is no longer"),
        ({"state": views(manifest, memory)["state"]}, "state is private, but lies in the shared memory"),
        ({"lora": torch.zeros(1)}, "lora is not among the weights"),
    ):
        with pytest.raises(WeightShareError, match=message):
            arena.verify({**good, **changes})


def test_memory_that_is_too_small_is_refused() -> None:
    with pytest.raises(WeightShareError, match="have 700 bytes of 768"):
        Arena(small(), torch.zeros(700, dtype=torch.uint8))
