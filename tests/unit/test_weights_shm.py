"""Weights in a sealed memory file: what loads, what attaches, what is refused, and what a write does."""

from __future__ import annotations

import faulthandler
import json
import mmap
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from sgl_omni.engine.checkpoint import Checkpoint, CheckpointError, Slot
from sgl_omni.engine.model import CausalModel
from sgl_omni.engine.weights import OwnWeights, SharePolicy, load_module, tensors_of
from sgl_omni.errors import WeightShareError
from sgl_omni.gpu.weights.backend import Handle
from sgl_omni.gpu.weights.cuda_driver import DriverError
from sgl_omni.gpu.weights.exchange import Offer
from sgl_omni.gpu.weights.manifest import Manifest
from sgl_omni.gpu.weights.share import SharedWeights, backend_named, best_backend
from sgl_omni.gpu.weights.shm import ShmBackend
from sgl_omni.models.demo_voice.model import VoiceDecoder
from sgl_omni.models.demo_voice.spec import PACKAGED_WEIGHTS

CPU = torch.device("cpu")
POLICY = SharePolicy("Tiny", private=("state",))


class Board:
    """Stands where the server's keeper does: one process's offers."""

    def __init__(self) -> None:
        self.offers: dict[str, Offer] = {}

    def fetch(self, model: str) -> Offer | None:
        offer = self.offers.get(model)
        return None if offer is None else copy_of(offer)

    def wait_for(self, model: str) -> Offer | None:
        return self.fetch(model)

    def withdraw(self, model: str) -> None:
        self.offers.pop(model).close()

    def publish(self, model: str, offer: Offer) -> None:
        self.offers[model] = copy_of(offer)


def copy_of(offer: Offer) -> Offer:
    fd = None if offer.handle.fd is None else os.dup(offer.handle.fd)
    return Offer(offer.backend, offer.outlives_leader, Handle(fd, offer.handle.data), os.dup(offer.manifest_fd))


@pytest.fixture
def board() -> Iterator[Board]:
    before = set(os.listdir("/proc/self/fd"))
    found = Board()
    yield found
    for offer in found.offers.values():
        offer.close()
    after = {fd for fd in set(os.listdir("/proc/self/fd")) - before if os.path.exists(f"/proc/self/fd/{fd}")}
    # each mapping keeps the file that it maps; every other descriptor is closed again
    assert all("sgl-omni-weights" in os.readlink(f"/proc/self/fd/{fd}") for fd in after)


def member(board: Board, *, leads: bool) -> SharedWeights:
    return SharedWeights("stage", board, may_load=leads)  # type: ignore[arg-type]


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3, bias=False)
        self.second = nn.Linear(3, 3, bias=False)
        self.second.weight = self.first.weight  # tied
        self.register_buffer("scale", torch.empty(2))
        self.register_buffer("state", torch.empty(2))
        self.register_buffer("none", None)


def load_tiny(store: Any, *, read: Callable[[Tiny], None] | None = None, fingerprint: str = "f") -> Tiny:
    with torch.device("meta"):
        model = Tiny()

    def fill() -> None:
        if read is not None:
            read(model)
        elif not model.scale.is_meta:  # on the meta device it is only a check
            raise AssertionError("a follower read the checkpoint")

    load_module(model, store, fill, device="cpu", dtype=torch.bfloat16, policy=POLICY, fingerprint=fingerprint)
    return model


@torch.no_grad()
def ones(model: Tiny) -> None:
    for tensor in tensors_of(model).values():
        tensor.fill_(1)


class Mortal(ShmBackend):
    """Memory that goes with its leader, as CUDA IPC's does."""

    outlives_leader = False


def test_what_goes_with_its_leader_is_refused_before_the_checkpoint_is_read(board: Board) -> None:
    store = SharedWeights("stage", board, may_load=True, lends=True, choose_backend=lambda _: Mortal())  # type: ignore[arg-type]
    with pytest.raises(WeightShareError, match=r"by 'shm' alone, .* separate servers cannot share them; .*: on"):
        load_tiny(store)
    assert not board.offers


def test_who_borrows_never_loads_and_lets_go_of_what_the_driver_has_lost(
    board: Board, monkeypatch: pytest.MonkeyPatch
) -> None:
    load_tiny(member(board, leads=True), read=ones)
    guest = SharedWeights("stage", board, may_load=False, borrows=True)  # type: ignore[arg-type]
    assert load_tiny(guest).first.weight.sum() == 9 and guest.describe()["attached"] is True

    def lost(*_: object) -> Tensor:
        raise DriverError("cuMemMap failed")

    with monkeypatch.context() as patch:
        patch.setattr(ShmBackend, "attach", lost)
        with pytest.raises(DriverError, match="cuMemMap failed"):
            load_tiny(SharedWeights("stage", board, may_load=False, borrows=True))  # type: ignore[arg-type]
    assert not board.offers, "so that the server borrows it again"
    with pytest.raises(WeightShareError, match="the other server lent no weights of it"):
        load_tiny(SharedWeights("stage", board, may_load=False, borrows=True))  # type: ignore[arg-type]


def test_a_follower_gets_what_the_leader_read_and_reads_nothing(board: Board) -> None:
    leader, follower = member(board, leads=True), member(board, leads=False)
    first, second = load_tiny(leader, read=ones), load_tiny(follower)
    for model in (first, second):
        assert [n for n, _ in model.named_parameters()] == ["first.weight"]
        assert model.second.weight is model.first.weight and model.none is None
        assert model.first.weight.dtype == torch.bfloat16 and not model.first.weight.requires_grad
        assert all((tensor == 1).all() for tensor in tensors_of(model).values())
    leader.verify(tensors_of(first))
    follower.verify(tensors_of(second))
    assert follower.describe() == {**follower.describe(), "backend": "shm", "attached": True, "bytes": 22}
    assert leader.describe()["attached"] is False
    first.state.fill_(7)
    assert second.state.tolist() == [1, 1]


def test_a_leader_that_comes_back_attaches_too(board: Board) -> None:
    load_tiny(member(board, leads=True), read=ones)
    again = member(board, leads=True)
    assert (load_tiny(again).first.weight == 1).all()
    assert again.describe()["attached"] is True


def test_weights_that_the_driver_lost_are_loaded_again_by_the_leader_alone(
    board: Board, monkeypatch: pytest.MonkeyPatch
) -> None:
    load_tiny(member(board, leads=True), read=ones)

    def lost(*_: object) -> Tensor:
        raise DriverError("cuMemImportFromShareableHandle failed: CUDA_ERROR_INVALID_VALUE (1)")

    with monkeypatch.context() as patch:
        patch.setattr(ShmBackend, "attach", lost)
        with pytest.raises(DriverError, match="INVALID_VALUE"):
            load_tiny(member(board, leads=False))
        assert board.offers
        again = member(board, leads=True)
        load_tiny(again, read=ones)
    assert again.describe()["attached"] is False
    assert (load_tiny(member(board, leads=False)).first.weight == 1).all()


@pytest.mark.parametrize("leads", [True, False])
def test_a_write_ends_the_process_and_changes_nothing(board: Board, leads: bool) -> None:
    first, second = load_tiny(member(board, leads=True), read=ones), load_tiny(member(board, leads=False))
    victim = first if leads else second
    pid = os.fork()
    if pid == 0:
        faulthandler.disable()
        victim.first.weight.add_(1)
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGSEGV
    assert (first.first.weight == 1).all() and (second.first.weight == 1).all()


def test_no_one_can_open_the_weights_for_writing(board: Board) -> None:
    load_tiny(member(board, leads=True), read=ones)
    fd = board.offers["stage"].handle.fd
    assert fd is not None
    with pytest.raises(PermissionError):
        os.pwrite(os.open(f"/proc/self/fd/{fd}", os.O_RDWR), b"x", 0)
    with pytest.raises(OSError):
        os.truncate(fd, 0)


def test_weights_are_not_shared_while_they_can_still_be_written(board: Board) -> None:
    kept: list[Tensor] = []

    def keep(model: Tiny) -> None:
        ones(model)
        kept.append(model.first.weight.data)

    with pytest.raises(WeightShareError, match="still holds a writable tensor"):
        load_tiny(member(board, leads=True), read=keep)
    assert not board.offers


def test_what_is_wrong_is_said(board: Board) -> None:
    with pytest.raises(WeightShareError, match="'stage': the group's leader has published no weights of it"):
        load_tiny(member(board, leads=False))
    leader = member(board, leads=True)
    with pytest.raises(WeightShareError, match="its factory did not load them from `weights`"):
        leader.describe()
    with pytest.raises(WeightShareError, match="never asked"):
        leader.verify({})
    with pytest.raises(WeightShareError, match="has no share policy"):
        leader.obtain({}, "cpu", lambda _: None, policy=None, fingerprint="")
    load_tiny(leader, read=ones)
    with pytest.raises(WeightShareError, match="checkpoint was changed after"):
        load_tiny(member(board, leads=False), fingerprint="g")
    with pytest.raises(WeightShareError, match="cannot be changed while replicas share them"):
        leader.refuse_update()
    with pytest.raises(WeightShareError, match="cannot be changed"):
        load_tiny(leader, read=ones)
    with pytest.raises(WeightShareError, match="'smoke', which is no backend"):
        backend_named("smoke")
    OwnWeights().refuse_update()


def test_a_tampered_manifest_is_refused_by_a_follower(board: Board) -> None:
    load_tiny(member(board, leads=True), read=ones)
    offer = board.offers["stage"]
    fields = json.loads(offer.manifest().to_bytes())
    fields["entries"][0]["offset"] += 256
    fd = os.memfd_create("tampered")
    os.write(fd, json.dumps(fields).encode())
    board.offers["stage"] = Offer("shm", True, offer.handle, fd)
    os.close(offer.manifest_fd)
    with pytest.raises(WeightShareError, match="was changed"):
        load_tiny(member(board, leads=False))


def test_memory_of_another_size_is_refused() -> None:
    fd = os.memfd_create("short")
    os.ftruncate(fd, 100)
    with pytest.raises(WeightShareError, match="have 100 bytes, but their manifest says 256"):
        ShmBackend().attach(Handle(fd), 256, CPU)
    os.close(fd)


def test_the_cpu_platform_takes_memory_files() -> None:
    assert best_backend(CPU).name == "shm"


# Checkpoints ----------------------------------------------------------------------------------------------------------


CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 17,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "max_position_embeddings": 64,
}


def checkpoint(folder: Path, dtype: torch.dtype = torch.float32, **changes: Any) -> Path:
    """A Llama of random weights, written under the names that such checkpoints have."""
    (folder / "config.json").write_text(json.dumps({**CONFIG, **changes}))
    from sgl_omni.engine.decoder_config import DecoderConfig

    model = CausalModel(DecoderConfig.parse({**CONFIG, **changes}))
    generator = torch.Generator().manual_seed(0)
    tensors = {s.name: torch.randn(s.shape, generator=generator).to(dtype) for s in model.slots("model.", "lm_head")}
    save_file(tensors, folder / "model.safetensors")
    return folder


def test_a_decoder_is_the_same_from_shared_weights(board: Board, tmp_path: Path) -> None:
    folder = checkpoint(tmp_path)
    policy = SharePolicy("LlamaForCausalLM")
    own = tensors_of(CausalModel.load(folder))
    leader, follower = member(board, leads=True), member(board, leads=False)
    for store in (leader, follower):
        model = CausalModel.load(folder, weights=store, policy=policy)
        found = tensors_of(model)
        assert found.keys() == own.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in own.items())
        model.verify_weights()
        model.decoder.norm.weight = nn.Parameter(model.decoder.norm.weight.clone(), requires_grad=False)
        with pytest.raises(WeightShareError, match=r"decoder\.norm\.weight is no longer in the shared memory"):
            model.verify_weights()
    assert follower.describe()["bytes"] == sum(tensor.nbytes for tensor in own.values())


@pytest.mark.parametrize("on_disk", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("wanted", [torch.float32, torch.bfloat16])
def test_checkpoints_load_the_same_with_and_without_conversion(
    tmp_path: Path, on_disk: torch.dtype, wanted: torch.dtype
) -> None:
    folder = checkpoint(tmp_path, on_disk)
    source = load_file(folder / "model.safetensors")
    model = CausalModel.load(folder, dtype=wanted)
    for slot in model.slots("model.", "lm_head"):
        assert torch.equal(slot.target, source[slot.name].to(wanted)), slot.name


def test_the_demo_voice_uses_the_shared_tensors_in_place(board: Board) -> None:
    leader, follower = member(board, leads=True), member(board, leads=False)
    models = [VoiceDecoder.load(PACKAGED_WEIGHTS, weights=store) for store in (leader, follower)]
    for model in models:
        model.verify_weights()
        assert {"embedding", "rotations", "head_bias"} <= model.tensors().keys()
    ids = torch.tensor([[5, 9, 11, 2], [0, 1, 2, 3]])
    assert torch.equal(*(model.embed_ids(ids) for model in models))
    assert torch.equal(models[1].embed_ids(ids), VoiceDecoder.load(PACKAGED_WEIGHTS).embed_ids(ids))


def test_columns_and_rows_of_a_tensor_are_its_own(tmp_path: Path) -> None:
    whole = torch.arange(60, dtype=torch.float32).view(6, 10)
    save_file({"w": whole}, tmp_path / "model.safetensors")
    rows, columns, large = torch.zeros(2, 10), torch.zeros(6, 3), torch.zeros(6, 20)
    strided = large[:, ::2]
    slots = [Slot("w", rows, (6, 10), 0, 3), Slot("w", columns, (6, 10), 1, 4), Slot("w", strided, (6, 10))]
    Checkpoint(tmp_path).load(slots)
    assert torch.equal(rows, whole[3:5]) and torch.equal(columns, whole[:, 4:7]) and torch.equal(strided, whole)


def test_a_file_that_was_cut_short_is_refused(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path)
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(CheckpointError, match=r"model\.safetensors has .*truncated"):
        CausalModel.load(folder)


def test_the_fingerprint_changes_with_the_checkpoint_and_not_with_its_place(tmp_path: Path) -> None:
    def fingerprint(folder: Path) -> str:
        return Checkpoint(folder).fingerprint()

    one, other = tmp_path / "one", tmp_path / "other"
    for folder in (one, other):
        folder.mkdir()
        checkpoint(folder)
        os.utime(folder / "model.safetensors", (10, 10))
    first = fingerprint(one)
    assert fingerprint(other) == first
    os.utime(other / "model.safetensors", (10, 11))
    assert fingerprint(other) != first
    os.utime(other / "model.safetensors", (10, 10))
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 1e-5}))
    assert fingerprint(other) != first


def test_private_patterns_of_a_policy_reach_the_manifest(board: Board) -> None:
    load_tiny(member(board, leads=True), read=ones)
    manifest: Manifest = board.offers["stage"].manifest()
    assert {e.name: e.private for e in manifest.entries} == {"first.weight": False, "scale": False, "state": True}
    assert (manifest.architecture, manifest.fingerprint) == ("Tiny", "f")


def test_own_weights_are_filled_and_separate() -> None:
    wanted: Mapping[str, Tensor] = {"a": torch.empty(2, 3, device="meta").t()}

    def fill(tensors: Mapping[str, Tensor]) -> None:
        tensors["a"].fill_(2)

    one, other = (OwnWeights().obtain(wanted, "cpu", fill, policy=None, fingerprint="")["a"] for _ in range(2))
    assert one.stride() == (1, 3) and (one == 2).all() and one.data_ptr() != other.data_ptr()


def test_sealing_waits_for_what_holds_the_memory_for_a_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    create = os.memfd_create
    monkeypatch.setattr(os, "memfd_create", lambda *arguments: made.append(create(*arguments)) or made[-1])
    allocation = ShmBackend().create(4096, torch.device("cpu"))
    other = mmap.mmap(made[0], 4096)
    timer = threading.Timer(0.1, other.close)
    timer.start()
    shared, handle = allocation.seal()
    timer.join()
    assert other.closed
    assert shared.shape == (4096,)
    assert handle.fd is not None
    os.close(handle.fd)
