# SPDX-License-Identifier: Apache-2.0
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ehs.engine.writer import Writer
from ehs.store import HiddenStatesError, error_path, read_hidden_states

FullMetadata = Callable[..., dict[str, str]]
STATES, TOKENS = torch.ones(3, 1, 4), torch.tensor([1, 2, 3])
# safetensors refuses it: a failure in the middle of a write.
UNWRITABLE = torch.ones(4, 1, 3).transpose(0, 2)


@pytest.fixture
def metadata(full_metadata: FullMetadata) -> dict[str, str]:
    return full_metadata(layer_ids="[0]", dtype="float32")


def test_a_record_that_cannot_be_written_raises_at_its_reader_and_later_ones_are_written(
    tmp_path: Path, metadata: dict[str, str]
) -> None:
    writer = Writer(1)
    writer.submit(tmp_path / "bad.safetensors", UNWRITABLE, TOKENS, metadata)
    writer.submit(tmp_path / "good.safetensors", STATES, TOKENS, metadata)
    writer.close()
    with pytest.raises(HiddenStatesError, match="could not write this record: ValueError"):
        read_hidden_states(tmp_path / "bad.safetensors", timeout=0)
    assert torch.equal(read_hidden_states(tmp_path / "good.safetensors", timeout=0).hidden_states, STATES)
    assert {path.name for path in tmp_path.iterdir()} == {"bad.safetensors.error", "good.safetensors"}


def test_states_that_never_arrive_on_the_host_become_a_marker_with_the_reason(
    tmp_path: Path, metadata: dict[str, str]
) -> None:
    def ready() -> None:
        raise RuntimeError("CUDA error: device-side assert triggered")

    writer = Writer(1)
    writer.submit(tmp_path / "a.safetensors", STATES, TOKENS, metadata, ready)
    writer.close()
    with pytest.raises(HiddenStatesError, match="device-side assert"):
        read_hidden_states(tmp_path / "a.safetensors", timeout=0)


def test_where_not_even_a_marker_can_be_written_the_engine_serves_on(tmp_path: Path, metadata: dict[str, str]) -> None:
    (tmp_path / "file").touch()
    writer = Writer(1)
    writer.submit(tmp_path / "file" / "a.safetensors", STATES, TOKENS, metadata)
    writer.submit(tmp_path / "b.safetensors", STATES, TOKENS, metadata)
    writer.close()
    assert read_hidden_states(tmp_path / "b.safetensors", timeout=0).token_ids.tolist() == [1, 2, 3]


def test_values_are_read_only_after_they_are_ready(tmp_path: Path, metadata: dict[str, str]) -> None:
    states = torch.zeros(3, 1, 4)
    writer = Writer(2)
    writer.submit(tmp_path / "a.safetensors", states, TOKENS, metadata, lambda: states.fill_(7))
    writer.close()
    assert (read_hidden_states(tmp_path / "a.safetensors", timeout=0).hidden_states == 7).all()


def test_submitting_does_not_wait_and_closing_does(tmp_path: Path, metadata: dict[str, str]) -> None:
    go = threading.Event()
    writer = Writer(2)
    paths = [tmp_path / f"{index}.safetensors" for index in range(6)]
    for path in paths:
        writer.submit(path, STATES, TOKENS, metadata, lambda: go.wait(20))
    assert not any(path.exists() for path in paths)
    threading.Timer(0.1, go.set).start()
    writer.close()
    assert all(path.exists() for path in paths)
    assert not any(error_path(path).exists() for path in paths)


def test_a_missing_folder_is_made(tmp_path: Path, metadata: dict[str, str]) -> None:
    writer = Writer(1)
    writer.submit(tmp_path / "new" / "folder" / "a.safetensors", STATES, TOKENS, metadata)
    writer.close()
    assert read_hidden_states(tmp_path / "new" / "folder" / "a.safetensors", timeout=0).layer_ids == (0,)
