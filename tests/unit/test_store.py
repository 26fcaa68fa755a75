# SPDX-License-Identifier: Apache-2.0
import errno
import itertools
import json
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from ehs import store
from ehs.store import (
    HiddenStatesError,
    error_path,
    file_name,
    inspect_path,
    read_hidden_states,
    write_error,
    write_record,
)

SaveRecord = Callable[..., Path]
FullMetadata = Callable[..., dict[str, str]]

DTYPES = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}


def random_bits(dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Any bit pattern at all, NaN payloads and negative zeros included."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-(2**31), 2**31, shape, generator=generator).to(DTYPES[dtype]).view(dtype)


def assert_same_bits(a: torch.Tensor, b: torch.Tensor) -> None:
    assert a.dtype == b.dtype
    assert torch.equal(a.view(DTYPES[a.dtype]), b.view(DTYPES[b.dtype]))


@pytest.fixture
def record(tmp_path: Path, save_record: SaveRecord) -> Path:
    states = torch.arange(24).reshape(3, 2, 4).float()
    return save_record(tmp_path / "a.safetensors", states, torch.tensor([5, 6, 7]), layer_ids="[4, 2]")


# ---- what is written is what is read ----


@given(
    dtype=st.sampled_from(list(DTYPES)),
    shape=st.tuples(st.integers(1, 9), st.integers(1, 4), st.integers(1, 9)),
    seed=st.integers(0, 2**31),
)
def test_every_bit_comes_back(
    *, scratch: Path, full_metadata: FullMetadata, dtype: torch.dtype, shape: tuple[int, int, int], seed: int
) -> None:
    states = random_bits(dtype, shape, seed)
    token_ids = torch.randint(-(2**62), 2**62, shape[:1], generator=torch.Generator().manual_seed(seed))
    layer_ids = list(range(40, 40 - shape[1], -1))
    metadata = full_metadata(layer_ids=json.dumps(layer_ids), dtype=str(dtype)[6:], request_id="\u00e9 \u4e00\n")
    write_record(scratch / "bits.safetensors", states, token_ids, metadata)
    record = read_hidden_states(scratch / "bits.safetensors", timeout=0, finite=False)
    assert_same_bits(record.hidden_states, states)
    assert torch.equal(record.token_ids, token_ids)
    assert list(record.layer_ids) == layer_ids
    assert metadata.items() <= record.metadata.items()


def test_a_layer_is_found_by_its_id_and_not_by_its_column(record: Path) -> None:
    states = read_hidden_states(record, timeout=0)
    assert torch.equal(states.layer(2), states.hidden_states[:, 1])
    assert torch.equal(states.layer(4), states.hidden_states[:, 0])
    with pytest.raises(ValueError, match=r"layer_id=3: this record holds \[4, 2\]"):
        states.layer(3)


def test_plain_safetensors_readers_find_the_two_tensors_of_upstream_and_nothing_else(record: Path) -> None:
    tensors = safetensors.torch.load_file(record)
    assert set(tensors) == {"hidden_states", "token_ids"}
    assert tensors["hidden_states"].shape == (3, 2, 4)
    assert (tensors["token_ids"].tolist(), tensors["token_ids"].dtype) == ([5, 6, 7], torch.int64)


def test_a_record_is_private_whatever_the_umask(tmp_path: Path, save_record: SaveRecord) -> None:
    before = os.umask(0o022)
    try:
        path = save_record(tmp_path / "a.safetensors", torch.zeros(1, 1, 4), torch.tensor([1]))
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o600


# ---- whole or not at all ----


@pytest.mark.parametrize("failure", [OSError(errno.ENOSPC, "disk full"), KeyboardInterrupt(), ValueError("no")])
def test_a_write_that_fails_halfway_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, full_metadata: FullMetadata, failure: BaseException
) -> None:
    def half(_tensors: object, name: str, **_: object) -> None:
        Path(name).write_bytes(b"half of it")
        raise failure

    monkeypatch.setattr(store, "save_file", half)
    with pytest.raises(type(failure)):
        write_record(tmp_path / "a.safetensors", torch.zeros(1, 1, 4), torch.tensor([1]), full_metadata())
    assert list(tmp_path.iterdir()) == []


def test_a_write_that_fails_leaves_the_older_record_whole(
    record: Path, monkeypatch: pytest.MonkeyPatch, full_metadata: FullMetadata
) -> None:
    def fail(_tensors: object, name: str, **_: object) -> None:
        Path(name).write_bytes(b"half of it")
        raise safetensors.SafetensorError("I/O error: No space left on device")

    before = record.read_bytes()
    monkeypatch.setattr(store, "save_file", fail)
    with pytest.raises(OSError, match="No space left on device") as error:
        write_record(record, torch.zeros(1, 1, 4), torch.tensor([1]), full_metadata())
    assert str(record) in str(error.value)
    assert (record.read_bytes(), list(record.parent.iterdir())) == (before, [record])


def test_nothing_stands_under_the_final_name_while_bytes_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, save_record: SaveRecord
) -> None:
    seen = []

    def watching(tensors: dict[str, torch.Tensor], name: str, metadata: dict[str, str]) -> None:
        safetensors.torch.save_file(tensors, name, metadata=metadata)
        # A reader that lists records by their suffix must not see the unfinished one either.
        seen.append((Path(name).parent, list(tmp_path.glob("*.safetensors"))))

    monkeypatch.setattr(store, "save_file", watching)
    path = save_record(tmp_path / "a.safetensors", torch.zeros(1, 1, 4), torch.tensor([1]))
    assert seen == [(tmp_path, [])]
    assert path.is_file()


def test_writers_of_the_same_name_do_not_mix(tmp_path: Path, save_record: SaveRecord) -> None:
    path = tmp_path / "a.safetensors"
    start = threading.Barrier(4)

    def write(value: int) -> None:
        start.wait()
        for _ in range(10):
            save_record(path, torch.full((50, 1, 64), float(value)), torch.full((50,), value))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(write, range(4)))
    record = read_hidden_states(path, timeout=0)
    assert (record.hidden_states == record.token_ids[0]).all()
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("num_tokens", [3, 2, 40])
def test_a_record_that_is_replaced_while_it_is_read_is_read_as_the_old_or_the_new_one(
    record: Path, monkeypatch: pytest.MonkeyPatch, save_record: SaveRecord, num_tokens: int
) -> None:
    open_again = torch.UntypedStorage.from_file
    replaced: list[Path] = []

    def replace_first(*arguments: Any, **options: Any) -> Any:
        if not replaced:
            replaced.append(save_record(record, torch.full((num_tokens, 1, 4), 9.0), torch.full((num_tokens,), 9)))
        return open_again(*arguments, **options)

    monkeypatch.setattr(torch.UntypedStorage, "from_file", replace_first)
    states = read_hidden_states(record, timeout=0)
    assert states.token_ids.tolist() in ([5, 6, 7], [9] * num_tokens)


# ---- waiting ----


def test_the_reader_waits_for_a_record_that_is_written_later(tmp_path: Path, save_record: SaveRecord) -> None:
    path = tmp_path / "late.safetensors"
    states = torch.rand(3, 1, 4)
    timer = threading.Timer(0.2, save_record, (path, states, torch.tensor([1, 2, 3])))
    timer.start()
    record = read_hidden_states(str(path), timeout=20)
    timer.join()
    assert torch.equal(record.hidden_states, states)


def test_the_reader_gives_up_after_its_timeout(tmp_path: Path) -> None:
    start = time.monotonic()
    with pytest.raises(TimeoutError, match=r"never\.safetensors.*timeout=0\.2"):
        read_hidden_states(tmp_path / "never.safetensors", timeout=0.2)
    assert 0.2 <= time.monotonic() - start < 3


@pytest.mark.parametrize("written_after_s", [0.0, 0.1])
def test_an_error_marker_ends_the_wait_at_once_with_the_reason(tmp_path: Path, written_after_s: float) -> None:
    path = tmp_path / "a.safetensors"
    reason = "OSError: disk \u00fc full\nsecond line"
    timer = threading.Timer(written_after_s, write_error, (path, reason))
    start = time.monotonic()
    timer.start()
    with pytest.raises(HiddenStatesError) as error:
        read_hidden_states(path, timeout=40)
    timer.join()
    assert time.monotonic() - start < 10
    assert reason in str(error.value)
    assert str(path) in str(error.value)
    assert list(tmp_path.iterdir()) == [error_path(path)]


def test_a_record_counts_more_than_an_old_error_marker(record: Path) -> None:
    write_error(record, "of an earlier attempt")
    assert read_hidden_states(record, timeout=0).layer_ids == (4, 2)


@pytest.mark.parametrize(
    "timeout",
    [
        -1.0,
        -1e-9,
        float("nan"),
    ],
)
def test_a_timeout_that_is_no_time_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, timeout: float) -> None:
    naps = itertools.count()

    def nap(_seconds: float) -> None:
        if next(naps) > 1000:
            pytest.fail("still waiting")

    monkeypatch.setattr(time, "sleep", nap)
    with pytest.raises(ValueError, match="timeout="):
        read_hidden_states(tmp_path / "a.safetensors", timeout=timeout)


# ---- damage ----


def small_record(folder: Path, save_record: SaveRecord) -> tuple[Path, bytes, range]:
    """A small whole record, its bytes, and where the numbers stand in it."""
    states = torch.tensor([[[1.0, -2.0], [0.5, 3.0]]]).to(torch.bfloat16)
    path = save_record(folder / "small.safetensors", states, torch.tensor([300]), layer_ids="[3, 0]")
    content = path.read_bytes()
    first = 8 + int.from_bytes(content[:8], "little")
    return path, content, range(first, len(content))


def flipped(content: bytes, position: int, bit: int) -> bytes:
    return content[:position] + bytes([content[position] ^ 1 << bit]) + content[position + 1 :]


@given(data=st.data())
def test_one_flipped_bit_in_the_numbers_is_noticed(
    *, scratch: Path, save_record: SaveRecord, data: st.DataObject
) -> None:
    path, content, numbers = small_record(scratch, save_record)
    path.write_bytes(flipped(content, data.draw(st.sampled_from(numbers)), data.draw(st.integers(0, 7))))
    with pytest.raises(HiddenStatesError, match=r"small\.safetensors"):
        read_hidden_states(path, timeout=0, finite=False)


def metadata_range(content: bytes) -> range:
    """Where the metadata map stands."""
    start = content.index(b'"__metadata__":{') + len(b'"__metadata__":{')
    return range(start, content.index(b"}", start))


def test_one_flipped_bit_in_what_describes_the_tensors_is_noticed(tmp_path: Path, save_record: SaveRecord) -> None:
    path, content, numbers = small_record(tmp_path, save_record)
    described_by = set(range(numbers.start)) - set(metadata_range(content))
    for position, bit in itertools.product(sorted(described_by), range(8)):
        path.write_bytes(flipped(content, position, bit))
        with pytest.raises(HiddenStatesError, match=r"small\.safetensors"):
            read_hidden_states(path, timeout=0, finite=False)


@given(data=st.data())
def test_one_flipped_bit_in_the_metadata_is_noticed(
    *, scratch: Path, save_record: SaveRecord, data: st.DataObject
) -> None:
    path, content, _ = small_record(scratch, save_record)
    path.write_bytes(
        flipped(content, data.draw(st.sampled_from(metadata_range(content))), data.draw(st.integers(0, 7)))
    )
    with pytest.raises(HiddenStatesError, match=r"small\.safetensors"):
        read_hidden_states(path, timeout=0, finite=False)


def test_every_truncation_is_noticed(tmp_path: Path, save_record: SaveRecord) -> None:
    path, content, _ = small_record(tmp_path, save_record)
    for length in range(len(content)):
        path.write_bytes(content[:length])
        with pytest.raises(HiddenStatesError, match=r"small\.safetensors"):
            read_hidden_states(path, timeout=0)


def test_bytes_that_do_not_belong_to_the_record_are_noticed(tmp_path: Path, save_record: SaveRecord) -> None:
    path, content, _ = small_record(tmp_path, save_record)
    for wrong in (content + b"\0", content + content, b"\0" * len(content), content[::-1]):
        path.write_bytes(wrong)
        with pytest.raises(HiddenStatesError, match=r"small\.safetensors"):
            read_hidden_states(path, timeout=0)


STATES, TOKENS = torch.ones(3, 2, 4), torch.tensor([5, 6, 7])


@pytest.mark.parametrize(
    ("states", "token_ids", "metadata", "reason"),
    [
        (STATES, torch.tensor([5, 6]), {}, "2 tokens and 2 layers"),
        (STATES, TOKENS, {"layer_ids": "[1]"}, "3 tokens and 1 layers"),
        (STATES[:, 0], TOKENS, {"layer_ids": "[1, 2, 3, 4]"}, r"\[3, 4\]"),
        (STATES[..., None], TOKENS, {"layer_ids": "[1, 2]"}, r"\[3, 2, 4, 1\]"),
        (STATES.bfloat16(), TOKENS, {"dtype": "float16"}, "dtypes bfloat16 and torch.int64, expected float16"),
        (STATES, TOKENS.int(), {}, "torch.int32, expected float32 and torch.int64"),
        (STATES, torch.tensor(5), {}, "token"),
        (STATES, TOKENS[:, None], {}, "token"),
        (STATES, TOKENS, {"layer_ids": "[1, 2"}, "layer_ids"),
        (STATES, TOKENS, {"layer_ids": "12"}, "layer_ids"),
    ],
)
def test_a_record_that_contradicts_itself_is_refused(
    *,
    tmp_path: Path,
    save_record: SaveRecord,
    states: torch.Tensor,
    token_ids: torch.Tensor,
    metadata: dict[str, str],
    reason: str,
) -> None:
    path = save_record(tmp_path / "a.safetensors", states, token_ids, **metadata)
    with pytest.raises(HiddenStatesError, match=reason) as error:
        read_hidden_states(path, timeout=0)
    assert str(path) in str(error.value)


@pytest.mark.parametrize("key", store.METADATA_KEYS)
def test_a_record_without_one_of_its_metadata_keys_is_refused_and_the_key_named(record: Path, key: str) -> None:
    with safetensors.safe_open(record, framework="pt") as file:
        metadata = file.metadata()
    del metadata[key]
    safetensors.torch.save_file(safetensors.torch.load_file(record), record, metadata=metadata)
    with pytest.raises(HiddenStatesError, match=f"lacks {key} "):
        read_hidden_states(record, timeout=0)


def test_a_file_of_another_format_version_is_refused(record: Path) -> None:
    with safetensors.safe_open(record, framework="pt") as file:
        metadata = file.metadata() | {"ehs_format": "2"}
    safetensors.torch.save_file(safetensors.torch.load_file(record), record, metadata=metadata)
    with pytest.raises(HiddenStatesError, match="ehs_format='2'"):
        read_hidden_states(record, timeout=0)


@pytest.mark.parametrize("names", [["hidden_states"], ["token_ids"], ["hidden_states", "token_ids", "logits"]])
def test_a_file_with_other_tensors_is_refused(record: Path, names: list[str]) -> None:
    with safetensors.safe_open(record, framework="pt") as file:
        metadata = file.metadata()
    tensors = safetensors.torch.load_file(record) | {"logits": torch.zeros(1)}
    safetensors.torch.save_file({name: tensors[name] for name in names}, record, metadata=metadata)
    with pytest.raises(HiddenStatesError, match="expected hidden_states and token_ids"):
        read_hidden_states(record, timeout=0)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", list(DTYPES))
def test_what_is_not_finite_is_refused_with_its_place_unless_allowed(
    tmp_path: Path, save_record: SaveRecord, dtype: torch.dtype, value: float
) -> None:
    states = torch.zeros(3, 2, 4, dtype=dtype)
    states[1, 1, 3] = value
    path = save_record(tmp_path / "a.safetensors", states, torch.tensor([1, 2, 3]))
    with pytest.raises(HiddenStatesError, match="not finite at token 1, column 1, channel 3"):
        read_hidden_states(path, timeout=0)
    assert_same_bits(read_hidden_states(path, timeout=0, finite=False).hidden_states, states)


# ---- names ----

TEXT = st.one_of(
    st.text(st.characters(codec=None), max_size=300),
    st.text("./\\\0 ~-\n", max_size=12),
    st.text("a", min_size=195, max_size=260),
    st.just("x" * 10_000),
    st.just("\u4e00" * 10_000),
)


@given(TEXT)
@example("")
@example(".")
@example("..")
@example("../../etc/passwd")
@example("/etc/passwd")
@example("a\0b")
@example("\ud800")
@example("-")
@example("plain\n")
def test_any_request_id_gives_a_file_name_that_stays_in_its_folder(request_id: str) -> None:
    name = file_name(request_id)
    assert not set(name) & {"/", "\\", "\0", "\n"}
    assert Path("folder", name).parts == ("folder", name)
    assert not name.startswith((".", "-"))
    assert name.endswith(".safetensors")
    # The marker and its temporary file stand beside the record.
    assert len(os.fsencode(name + ".error.tmp")) <= 255


@given(TEXT, TEXT)
@example("a", "A")
@example("a", "a.safetensors")
@example("a/b", "a_b")
@example("x" * 200, "x" * 201)
@example("\ud83d\ude00", "\U0001f600")
def test_two_request_ids_never_share_a_file(first: str, second: str) -> None:
    assert (file_name(first) == file_name(second)) == (first == second)


def test_a_request_id_that_looks_like_a_hashed_name_does_not_take_it() -> None:
    other = "tenant/1"
    assert file_name(file_name(other).removesuffix(".safetensors")) != file_name(other)


def test_a_plain_request_id_is_its_own_file_name() -> None:
    assert file_name("0_cmpl-8f2a.7") == "0_cmpl-8f2a.7.safetensors"


# ---- inspect ----


def test_inspecting_a_folder_tells_whole_from_broken_from_leftover_from_failed(
    tmp_path: Path, save_record: SaveRecord
) -> None:
    save_record(tmp_path / "good.safetensors", STATES, TOKENS, model="some/model")
    (tmp_path / "broken.safetensors").write_bytes(b"not a record")
    (tmp_path / ".late.safetensors.x1.tmp").write_bytes(b"half")
    (tmp_path / "notes.txt").write_text("not ours")
    write_error(tmp_path / "failed.safetensors", "OSError: disk full")
    found = {item.path.name: item for item in inspect_path(tmp_path)}
    assert set(found) == {
        "good.safetensors",
        "broken.safetensors",
        "failed.safetensors.error",
        ".late.safetensors.x1.tmp",
    }
    good = found["good.safetensors"]
    assert good.problem is None
    assert {"num_tokens": 3, "num_layers": 2, "hidden_size": 4, "model": "some/model"}.items() <= good.summary.items()
    assert good.summary["bytes"] == (tmp_path / "good.safetensors").stat().st_size
    assert "safetensors" in (found["broken.safetensors"].problem or "")
    assert "disk full" in (found["failed.safetensors.error"].problem or "")
    assert "writer that died" in (found[".late.safetensors.x1.tmp"].problem or "")


def test_what_a_killed_writer_leaves_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, save_record: SaveRecord
) -> None:
    def die(_self: Path, _target: Path) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", die)
        # Nothing is cleaned up when a process is killed.
        patch.setattr(Path, "unlink", lambda *_, **__: None)
        with pytest.raises(KeyboardInterrupt):
            save_record(tmp_path / ("n" * 212), STATES, TOKENS)
    (leftover,) = inspect_path(tmp_path)
    assert "writer that died" in (leftover.problem or "")


def test_what_a_writer_killed_at_its_error_marker_leaves_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(_self: Path, _target: Path) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", die)
        with pytest.raises(KeyboardInterrupt):
            write_error(tmp_path / "a.safetensors", "disk full")
    assert len(inspect_path(tmp_path)) == 1


def test_inspecting_one_file_looks_at_that_file_only(record: Path) -> None:
    (record.parent / "broken.safetensors").write_bytes(b"not a record")
    (item,) = inspect_path(record)
    assert (item.path, item.problem, item.summary["layer_ids"]) == (record, None, "[4, 2]")


@pytest.mark.parametrize("content", ["", "{}", "[]"])
def test_a_damaged_error_marker_does_not_hide_the_rest_of_the_folder(record: Path, content: str) -> None:
    error_path(record.with_name("b.safetensors")).write_text(content)
    assert sorted(item.problem is None for item in inspect_path(record.parent)) == [False, True]


def test_an_empty_folder_and_a_missing_path_are_errors_of_the_caller(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no record"):
        inspect_path(tmp_path)
    with pytest.raises(ValueError, match="no such file or folder"):
        inspect_path(tmp_path / "missing")
