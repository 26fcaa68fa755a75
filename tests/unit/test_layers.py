# SPDX-License-Identifier: Apache-2.0
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ehs.layers import LayerSelection, check_layer_ids


@st.composite
def selections(draw: st.DrawFn) -> LayerSelection:
    num_hidden_layers = draw(st.integers(1, 80))
    ids = st.integers(-num_hidden_layers - 1, num_hidden_layers)
    return LayerSelection(tuple(draw(st.lists(ids, min_size=1, max_size=12))), num_hidden_layers)


@given(selections())
def test_vllm_captures_each_layer_once_in_depth_order(selection: LayerSelection) -> None:
    assert all(a < b for a, b in zip(selection.captured, selection.captured[1:], strict=False))
    assert set(selection.captured) == set(selection.layer_ids)


@given(selections())
def test_every_column_comes_from_the_layer_asked_for(selection: LayerSelection) -> None:
    by_depth = list(range(selection.num_hidden_layers + 1))
    wanted = [by_depth[layer] for layer in selection.asked]
    assert list(selection.layer_ids) == wanted
    assert [selection.captured[source] for source in selection.sources] == wanted


def test_minus_one_is_the_stream_after_the_last_layer_and_zero_the_embeddings() -> None:
    assert LayerSelection((-1, 0, -7, 6), 6).layer_ids == (6, 0, 0, 6)


@given(
    num_hidden_layers=st.integers(1, 60),
    beyond=st.integers(1, 10**6),
    negative=st.booleans(),
    before=st.lists(st.just(0), max_size=3),
)
def test_an_id_the_model_does_not_have_is_refused_with_the_ids_it_has(
    *,
    num_hidden_layers: int,
    beyond: int,
    negative: bool,
    before: list[int],
) -> None:
    layer = -num_hidden_layers - 1 - beyond if negative else num_hidden_layers + beyond
    asked = [*before, layer]
    with pytest.raises(ValueError, match="out of range") as error:
        LayerSelection(tuple(asked), num_hidden_layers)
    message = str(error.value)
    assert f"layers={asked}" in message
    assert f"layer id {layer} " in message
    assert f"0 to {num_hidden_layers} " in message
    assert f"{-num_hidden_layers - 1} to -1" in message


@pytest.mark.parametrize(
    ("layers", "named"),
    [
        ([], "layers=[]"),
        ((), "layers=[]"),
        ([True], "True"),
        ([0, False], "False"),
        ([1.0], "1.0"),
        (["1"], "'1'"),
        ([None], "None"),
        ([[1]], "[1]"),
        ("1,2", "'1,2'"),
        (None, "None"),
        (3, "3"),
        ({1, 2}, "{1, 2}"),
    ],
)
def test_what_is_no_list_of_integers_is_refused_by_name(layers: Any, named: str) -> None:
    with pytest.raises(ValueError, match=r"^layers=") as error:
        check_layer_ids(layers)
    assert named in str(error.value)


def test_bytes_are_refused_as_text_is() -> None:
    with pytest.raises(ValueError, match=r"^layers="):
        check_layer_ids(b"12")


def test_a_selection_checks_the_types_too() -> None:
    with pytest.raises(ValueError, match="True is not an integer"):
        LayerSelection((True,), 6)
    with pytest.raises(ValueError, match="at least one"):
        LayerSelection((), 6)
