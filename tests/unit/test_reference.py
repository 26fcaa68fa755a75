# SPDX-License-Identifier: Apache-2.0
import json
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ehs.models import code
from ehs.verify.metrics import rms, ulp
from ehs.verify.reference import (
    Baseline,
    PredictableReference,
    Reference,
    decoder_layers,
    move_by_ulp,
    read_model_config,
)

PROMPT = [3, 41, 7, 0, 63, 12, 12, 30]
NUM_LAYERS = 4


@pytest.fixture(scope="module")
def reference(tiny_llama: Path) -> Reference:
    return Reference(str(tiny_llama), "float32")


@pytest.fixture(scope="module")
def reduced(tiny_llama: Path) -> Reference:
    return Reference(str(tiny_llama), "bfloat16")


def test_layer_0_is_the_embedding_output(reference: Reference) -> None:
    embeddings = reference.model.get_input_embeddings()(torch.tensor(PROMPT))
    assert torch.equal(reference.states(PROMPT)[:, 0], embeddings)


@torch.inference_mode()
def test_inner_layers_are_what_hugging_face_calls_hidden_states(reference: Reference) -> None:
    output = reference.model(input_ids=torch.tensor([PROMPT]), output_hidden_states=True)
    states = reference.states(PROMPT)
    assert states.shape == (len(PROMPT), NUM_LAYERS + 1, 32)
    for layer_id in range(NUM_LAYERS):
        assert torch.equal(states[:, layer_id], output.hidden_states[layer_id][0])
    # Hugging Face gives the last one after the norm.
    assert not torch.allclose(states[:, NUM_LAYERS], output.hidden_states[NUM_LAYERS][0], rtol=0.1)


@torch.inference_mode()
def test_the_last_layer_is_the_stream_before_the_final_norm(reference: Reference) -> None:
    model = reference.model
    logits = model.lm_head(model.model.norm(reference.states(PROMPT)[:, NUM_LAYERS]))
    assert torch.equal(logits, model(input_ids=torch.tensor([PROMPT])).logits[0])


def test_states_of_a_prompt_are_those_of_its_beginning(reference: Reference) -> None:
    assert torch.allclose(reference.states(PROMPT)[:5], reference.states(PROMPT[:5]), rtol=1e-4, atol=1e-5)
    other = [*PROMPT[:2], 50, *PROMPT[3:]]
    differs = (reference.states(PROMPT) != reference.states(other)).any(dim=-1)
    assert differs[:, 1:].any(dim=1).tolist() == [False, False] + [True] * 6
    assert differs[:, 0].tolist() == [False, False, True] + [False] * 5


def test_states_are_kept_and_run_computes_anew(reference: Reference) -> None:
    assert reference.states(PROMPT) is reference.states(tuple(PROMPT))
    assert reference.run(PROMPT) is not reference.states(PROMPT)
    assert torch.equal(reference.run(PROMPT), reference.states(PROMPT))


def num_hooks(model: torch.nn.Module) -> int:
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())


def test_no_hook_stays_behind_even_when_the_model_fails(reference: Reference) -> None:
    before = num_hooks(reference.model)
    reference.run(PROMPT)
    with pytest.raises(IndexError):
        reference.run([64])
    assert num_hooks(reference.model) == before


def test_a_16_bit_reference_runs_in_its_dtype_and_answers_in_fp32(reference: Reference, reduced: Reference) -> None:
    states = reduced.states(PROMPT)
    assert states.dtype == torch.float32
    assert torch.equal(states, states.bfloat16().float())
    assert not torch.equal(states, reference.states(PROMPT))


def test_a_seed_moves_the_input_of_the_first_layer_and_what_follows_and_can_be_repeated(reduced: Reference) -> None:
    plain, moved = reduced.run(PROMPT), reduced.run(PROMPT, seed=1)
    assert torch.equal(moved, reduced.run(PROMPT, seed=1))
    assert not torch.equal(moved, reduced.run(PROMPT, seed=2))
    difference = (moved - plain)[:, 0].double().abs()
    assert (difference <= ulp(plain[:, 0].double().abs(), torch.bfloat16)).all()
    assert (difference > 0).any(dim=-1).all()
    assert (moved != plain)[:, 1:].any()


@given(st.integers(0, 2**31), st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
def test_no_number_moves_by_more_than_one_ulp(seed: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(seed)
    values = (torch.randn(64, generator=generator) * torch.logspace(-4, 4, 64)).to(dtype)
    moved = move_by_ulp(values, seed)
    assert moved.dtype == dtype
    assert ((moved.double() - values.double()).abs() <= ulp(values.double().abs(), dtype)).all()


def test_moving_goes_up_and_down() -> None:
    moved = move_by_ulp(torch.full((1000,), 1.5, dtype=torch.bfloat16), 3) - 1.5
    assert (moved > 0).sum() > 100
    assert (moved < 0).sum() > 100


def test_the_own_error_grows_with_each_run_and_starts_with_the_plain_one(
    reference: Reference, reduced: Reference
) -> None:
    errors = list(Baseline(reference, reduced).own_errors(PROMPT))
    plain = rms(reduced.run(PROMPT).double() - reference.states(PROMPT).double())
    assert len(errors) == Baseline.NUM_MOVED + 1
    assert torch.equal(errors[0], plain)
    assert all((after >= before).all() for before, after in pairwise(errors))
    assert (errors[-1][:, 1:] > errors[0][:, 1:]).any()


def test_moving_the_input_does_not_count_as_an_error_of_layer_0(reference: Reference, reduced: Reference) -> None:
    # The weights are bf16 numbers: both dtypes embed to the same ones.
    *_, last = Baseline(reference, reduced).own_errors(PROMPT)
    assert (last[:, 0] == 0).all()
    assert (last[:, 1:] > 0).all()


def test_runs_are_made_when_asked_for_and_kept(reference: Reference, reduced: Reference) -> None:
    class Counting:
        num_runs = 0

        def run(self, token_ids: list[int], seed: int | None = None) -> torch.Tensor:
            self.num_runs += 1
            return reduced.run(token_ids, seed)

    counting: Any = Counting()
    baseline = Baseline(reference, counting)
    next(baseline.own_errors(PROMPT))
    assert counting.num_runs == 1
    errors = baseline.own_errors(PROMPT)
    for _ in range(3):
        next(errors)
    assert counting.num_runs == 3
    next(baseline.own_errors(PROMPT[:4]))
    assert counting.num_runs == 4


@given(st.lists(st.integers(0, 4095), min_size=1, max_size=20), st.integers(1, 30), st.integers(14, 64))
def test_the_predictable_reference_has_each_layer_in_its_column(
    tokens: list[int], num_layers: int, hidden_size: int
) -> None:
    states = PredictableReference(hidden_size, num_layers).states(tokens)
    assert states.shape == (len(tokens), num_layers + 1, hidden_size)
    for layer_id in (0, num_layers // 2, num_layers):
        assert code.decode(states[-1, layer_id]) == code.Place(layer_id, len(tokens) - 1, tokens[-1])


class TwoStacks(torch.nn.Module):
    """A model with as many experts as layers."""

    def __init__(self, num_layers: int, num_experts: int) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Identity() for _ in range(num_layers))
        self.experts = torch.nn.ModuleList(torch.nn.Identity() for _ in range(num_experts))
        text = SimpleNamespace(num_hidden_layers=4)
        self.config: Any = SimpleNamespace(get_text_config=lambda: text)


def test_the_decoder_layers_are_found_by_their_number_and_doubt_is_an_error() -> None:
    model = TwoStacks(4, 8)
    assert decoder_layers(model) is model.layers
    for num_layers, num_experts, found in ((4, 4, 2), (3, 5, 0)):
        with pytest.raises(ValueError, match=f"TwoStacks: {found} module lists have 4 entries"):
            decoder_layers(TwoStacks(num_layers, num_experts))


# ---- config.json ----


def folder_with(folder: Path, config: object) -> str:
    (folder / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    return str(folder)


def test_the_configuration_of_a_text_model_is_found_on_its_own_or_inside(tmp_path: Path) -> None:
    plain = {"num_hidden_layers": 5, "hidden_size": 8}
    assert read_model_config(folder_with(tmp_path, plain)) == plain
    assert read_model_config(folder_with(tmp_path, {"vision_config": {}, "text_config": plain})) == plain


@pytest.mark.parametrize(
    "config",
    [
        "{",
        "",
        {"hidden_size": 8},
        [],
    ],
)
def test_a_configuration_that_says_nothing_about_layers_is_refused_by_the_model_s_name(
    tmp_path: Path, config: object
) -> None:
    model = folder_with(tmp_path, config)
    with pytest.raises(ValueError, match="model=") as error:
        read_model_config(model)
    assert repr(model) in str(error.value)


@pytest.mark.parametrize(
    ("offline", "reason"),
    [
        (False, OSError("Name or service not known")),
        (True, OSError("offline mode is enabled\nmore lines")),
        (False, TimeoutError()),
    ],
)
def test_a_hub_that_does_not_answer_is_one_line_that_names_the_model(
    monkeypatch: pytest.MonkeyPatch, environ: dict[str, str], *, offline: bool, reason: Exception
) -> None:
    def download(model: str, name: str) -> str:
        assert (model, name) == ("owner/name", "config.json")
        raise reason

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    environ["HF_HUB_OFFLINE"] = str(int(offline))
    with pytest.raises(ValueError, match="model='owner/name': ") as error:
        read_model_config("owner/name")
    assert ("HF_HUB_OFFLINE is set" in str(error.value)) is offline
    assert "\n" not in str(error.value)


def test_a_hub_id_is_read_from_the_file_that_the_hub_gives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder_with(tmp_path, {"num_hidden_layers": 3})
    monkeypatch.setattr("huggingface_hub.hf_hub_download", lambda _, name: str(tmp_path / name))
    assert read_model_config("owner/name") == {"num_hidden_layers": 3}
