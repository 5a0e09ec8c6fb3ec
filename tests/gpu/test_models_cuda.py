"""Models with rules of their own on a GPU, through graphs, against transformers' own classes."""

from __future__ import annotations

import pytest
import test_csm
import test_higgs_audio_v2
import test_qwen3_omni
import test_whisper_decoder
import torch
from gpu_serving import codes, serve
from test_csm import Csm, csm
from test_higgs_audio_v2 import Higgs, higgs
from test_qwen3_omni import GROUPS, Omni, Speech, omni, payload_of, speeches, talker_engine, thinker_engine
from test_whisper_decoder import Whisper, whisper

__all__ = ["csm", "higgs", "omni", "speeches", "whisper"]

pytestmark = pytest.mark.gpu

POOLS = pytest.mark.parametrize("pool", [1024, 64])
GRAPHS = pytest.mark.parametrize("graphs", [0, 8])


@pytest.fixture(scope="module")
def one_thread() -> None:
    """Here it is the GPU that computes."""


@POOLS
@GRAPHS
def test_higgs_frames_equal_generate(higgs: Higgs, pool: int, graphs: int) -> None:
    model = higgs.model.to("cuda")
    engine = test_higgs_audio_v2.engine_for(
        model, True, max_total_tokens=max(pool, 68), cuda_graph_max_bs=graphs, chunked_prefill_tokens=16
    )
    handed = serve(engine, {name: case.payload for name, case in higgs.cases.items()})
    assert {name: codes(parts) for name, parts in handed.items()} == {n: c.frames for n, c in higgs.cases.items()}


@pytest.mark.parametrize("pool", [2048, 130])
@GRAPHS
def test_csm_frames_equal_transformers(csm: Csm, pool: int, graphs: int) -> None:
    engine = test_csm.engine_for(csm.model.to("cuda"), True, max_total_tokens=pool, cuda_graph_max_bs=graphs)
    handed = serve(engine, {name: case.payload for name, case in csm.cases.items()})
    assert {name: codes(parts) for name, parts in handed.items()} == {n: c.codes for n, c in csm.cases.items()}


@POOLS
@GRAPHS
def test_the_talker_speaks_what_generate_speaks(omni: Omni, speeches: list[Speech], pool: int, graphs: int) -> None:
    omni.talker.to("cuda")
    engine = talker_engine(omni, True, max_total_tokens=pool, cuda_graph_max_bs=graphs)
    handed = serve(engine, {str(i): {**payload_of(s), "added_embeddings": s.text} for i, s in enumerate(speeches)})
    assert [codes(handed[str(i)]) for i in range(len(speeches))] == [speech.codes for speech in speeches]


@GRAPHS
def test_text_that_comes_piece_by_piece(omni: Omni, speeches: list[Speech], graphs: int) -> None:
    omni.talker.to("cuda")
    engine = talker_engine(omni, True, cuda_graph_max_bs=graphs)
    spoken: dict[str, list[list[int]]] = {str(i): [] for i in range(len(speeches))}
    for i, speech in enumerate(speeches):
        engine.add(str(i), {**payload_of(speech), "input_open": True})

    def drain() -> None:
        while engine.has_work:
            for output in engine.step():
                spoken[output.request_id] += codes(output.chunks)

    for at in range(0, 20, 3):
        drain()
        for i, speech in enumerate(speeches):
            if len(speech.text[at : at + 3]) and len(spoken[str(i)]) < test_qwen3_omni.FRAMES:
                engine.extend(str(i), {"added_embeddings": speech.text[at : at + 3]})
    for i in range(len(speeches)):
        engine.finish_input(str(i))
    drain()
    assert [spoken[str(i)] for i in range(len(speeches))] == [speech.codes for speech in speeches]


@GRAPHS
def test_sampled_codes_depend_on_the_seed_alone(omni: Omni, speeches: list[Speech], graphs: int) -> None:
    omni.talker.to("cuda")
    payloads = {
        f"{i} {seed}": {**payload_of(s), "temperature": 0.9, "top_k": 20, "added_embeddings": s.text, "seed": seed}
        for i, s in enumerate(speeches)
        for seed in (1, 2)
    }
    engine = talker_engine(omni, True, cuda_graph_max_bs=graphs)
    together = {name: codes(parts) for name, parts in serve(engine, payloads).items()}
    alone = {name: codes(serve(engine, {name: payload})[name]) for name, payload in payloads.items()}
    assert together == alone
    assert all(alone[f"{i} 1"] != alone[f"{i} 2"] for i in range(len(speeches)))
    assert all(len(row) == GROUPS for rows in alone.values() for row in rows)


@POOLS
@GRAPHS
def test_the_thinkers_hidden_states(omni: Omni, pool: int, graphs: int) -> None:
    thinker = omni.thinker.to("cuda")
    generator = torch.Generator().manual_seed(4)
    prompts = [torch.randint(30, 180, (n,), generator=generator).tolist() for n in (6, 25, 14, 40, 11, 18)]
    layers = [0, omni.talker.spec.accept_layer, -1]
    payloads = {
        str(i): {"prompt_ids": prompt, "max_new_tokens": 12, "hidden_states": layers, "ignore_eos": True}
        for i, prompt in enumerate(prompts)
    }
    engine = thinker_engine(omni, True, max_total_tokens=pool, cuda_graph_max_bs=graphs, chunked_prefill_tokens=16)
    assert thinker.device.type == "cuda"
    for name, parts in serve(engine, payloads).items():
        tokens = parts[-1]["token_ids"]
        rows = torch.cat([part["hidden_states"] for part in parts[:-1]])
        ids = torch.tensor([payloads[name]["prompt_ids"] + tokens[:-1]])
        with torch.no_grad():
            reference = omni.reference.thinker.model(ids, output_hidden_states=True)
        kept = (reference.hidden_states[0], reference.hidden_states[layers[1]], reference.last_hidden_state)
        expected = torch.stack([states[0] for states in kept], 1)
        assert rows.shape == expected.shape
        assert (rows - expected).abs().max() / expected.abs().max() < 1e-4


@POOLS
@GRAPHS
def test_whisper_says_what_generate_says(whisper: Whisper, pool: int, graphs: int) -> None:
    decoder = whisper.decoder.to("cuda")
    engine = test_whisper_decoder.engine_for(decoder, True, max_total_tokens=pool, cuda_graph_max_bs=graphs)
    handed = serve(engine, whisper.payloads)
    for name, windows in whisper.expected.items():
        assert test_whisper_decoder.said(handed[name][:-1]) == test_whisper_decoder.without_ends(windows)
