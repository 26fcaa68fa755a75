# SPDX-License-Identifier: Apache-2.0
from itertools import combinations, pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ehs.models.checkpoints import PREDICTABLE_VOCAB_SIZE, find_checkpoint
from ehs.verify.prompts import Prompts, arithmetic_prompts, text_prompts
from ehs.verify.scenarios import SCENARIOS


@given(st.integers(0, 1000), st.integers(0, 1000), st.integers(1, 300))
def test_prompts_of_different_requests_differ_at_every_position(first: int, second: int, length: int) -> None:
    pairs = zip(arithmetic_prompts(first, length), arithmetic_prompts(second, length), strict=True)
    assert all((a != b) == (first != second) for a, b in pairs)


@given(st.integers(0, 1000), st.integers(2, 300))
def test_neighbours_in_a_prompt_differ_and_every_token_is_in_the_vocabulary(index: int, length: int) -> None:
    prompt = arithmetic_prompts(index, length)
    assert len(prompt) == length
    assert all(a != b for a, b in pairwise(prompt))
    assert set(prompt) <= set(range(PREDICTABLE_VOCAB_SIZE))


@pytest.fixture
def texts(cache: Path) -> Prompts:
    assert cache.is_dir()
    return text_prompts(find_checkpoint("predictable"))


def test_text_prompts_have_the_length_asked_for_however_short_the_text_is(texts: Prompts) -> None:
    for length in (1, 96, 1016, 9000):
        assert len(texts(130, length)) == length
    assert texts(7, 50) == texts(7, 90)[:50]


def test_no_two_requests_of_a_scenario_read_the_same_text_unless_it_is_about_that(texts: Prompts) -> None:
    for name, scenario in SCENARIOS.items():
        if name.startswith("prefix-hit"):
            continue
        for round_ in scenario.rounds(texts):
            for first, second in combinations([request.prompt_token_ids for request in round_], 2):
                shorter = min(len(first), len(second))
                assert first[:shorter] != second[:shorter], name
