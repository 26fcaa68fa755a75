# SPDX-License-Identifier: Apache-2.0
# The file format (version 1): one safetensors file a request, written under a temporary name and renamed when whole.
import hashlib
import json
import os
import re
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

FORMAT = "1"
SUFFIX = ".safetensors"
ERROR_SUFFIX = ".error"
CHECKSUM = "xxh3_64"
CAPTURE_POINT = "residual stream before the final norm"
METADATA_KEYS = (
    "ehs_format",
    "layer_ids",
    "capture_point",
    "model",
    "revision",
    "dtype",
    "engine",
    "runner",
    "speculator",
    "request_id",
    "num_prompt_tokens",
    "positions",
    "checksum",
)
_HASHED = "id-"
_PLAIN_NAME = re.compile(rf"(?!{_HASHED})[A-Za-z0-9_][A-Za-z0-9_.-]{{0,199}}")
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.001, 0.05


class HiddenStatesError(RuntimeError):
    """A record is missing, broken, or could not be written; the message names the file and the reason."""


@dataclass(frozen=True)
class HiddenStates:
    """One request's record.

    Attributes:
        path: file it was read from.
        token_ids: int64 `[num_tokens]`, the tokens the states belong to.
        hidden_states: `[num_tokens, num_layers, hidden_size]` in the model's dtype, on the CPU.
        layer_ids: `hidden_states[:, i]` is layer `layer_ids[i]`.
        metadata: the file's metadata map, all strings.
    """

    path: Path
    token_ids: torch.Tensor
    hidden_states: torch.Tensor
    layer_ids: tuple[int, ...]
    metadata: Mapping[str, str]

    def layer(self, layer_id: int) -> torch.Tensor:
        """States of one layer, `[num_tokens, hidden_size]`; raises ValueError when the record does not hold it."""
        if layer_id not in self.layer_ids:
            raise ValueError(f"layer_id={layer_id}: this record holds {list(self.layer_ids)}")
        return self.hidden_states[:, self.layer_ids.index(layer_id)]


def file_name(request_id: str) -> str:
    """File name for a request id: the id itself when it is plain, else a hash of it; never leaves its folder."""
    if _PLAIN_NAME.fullmatch(request_id):
        return request_id + SUFFIX
    return _HASHED + hashlib.sha256(request_id.encode(errors="surrogatepass")).hexdigest() + SUFFIX


def error_path(path: Path) -> Path:
    """Where the reason stands when a record could not be written."""
    return path.with_name(path.name + ERROR_SUFFIX)


def checksum(metadata: Mapping[str, str], token_ids: torch.Tensor, hidden_states: torch.Tensor) -> str:
    """`algorithm:hex` over the metadata without `checksum`, then the bytes of both tensors (contiguous, on the CPU)."""
    digest = xxhash.xxh3_64(json.dumps(sorted(item for item in metadata.items() if item[0] != "checksum")).encode())
    for tensor in (token_ids, hidden_states):
        digest.update(tensor.flatten().view(torch.uint8).numpy().data)
    return f"{CHECKSUM}:{digest.hexdigest()}"


def write_record(
    path: Path,
    # [num_tokens, num_layers, hidden_size]
    hidden_states: torch.Tensor,
    # [num_tokens]
    token_ids: torch.Tensor,
    metadata: Mapping[str, str],
) -> None:
    """Write one record so that it appears under `path` whole or not at all.

    Args:
        path: final name; its folder must exist.
        hidden_states: `[num_tokens, num_layers, hidden_size]`, contiguous, CPU.
        token_ids: int64 `[num_tokens]`, CPU.
        metadata: the keys of `METADATA_KEYS` other than `ehs_format` and `checksum`, which are added here.

    Raises:
        OSError: the file could not be written; nothing is left behind.
    """
    metadata = {**metadata, "ehs_format": FORMAT}
    metadata["checksum"] = checksum(metadata, token_ids, hidden_states)
    handle, name = tempfile.mkstemp(prefix=f".{path.name[:100]}.", suffix=".tmp", dir=path.parent)
    os.close(handle)
    temporary = Path(name)
    try:
        save_file({"hidden_states": hidden_states, "token_ids": token_ids}, name, metadata=metadata)
        temporary.replace(path)
    except BaseException as error:
        with suppress(FileNotFoundError):
            temporary.unlink()
        if isinstance(error, SafetensorError):
            raise OSError(f"{path}: {error}") from error
        raise


def write_error(path: Path, reason: str) -> None:
    """Leave a marker that makes `read_hidden_states(path)` raise with `reason` at once."""
    marker = error_path(path)
    temporary = marker.with_name(f".{marker.name}.tmp")
    temporary.write_text(json.dumps({"reason": reason}))
    temporary.replace(marker)


def read_error(marker: Path) -> str:
    """Reason that an error marker gives, or that it is damaged."""
    try:
        return str(json.loads(marker.read_text())["reason"])
    except (OSError, ValueError, KeyError, TypeError):
        return "the error marker is damaged"


def read_hidden_states(path: str | os.PathLike[str], *, timeout: float = 30.0, finite: bool = True) -> HiddenStates:
    """Read one record, waiting until it is complete, and check it.

    Args:
        path: `kv_transfer_params["hidden_states_path"]` of a request's output.
        timeout: seconds to wait for the file to appear.
        finite: refuse NaN and infinity.

    Returns:
        The record, checked: keys, shapes, dtypes, token count, checksum and (unless turned off) finiteness.

    Raises:
        TimeoutError: the file did not appear in time.
        HiddenStatesError: the engine reported that it could not write the record, or the file fails a check.
        ValueError: `timeout` is negative.
    """
    path = Path(path)
    if not timeout >= 0:
        raise ValueError(f"timeout={timeout}: seconds, 0 or more")
    _wait(path, timeout)
    try:
        # safe_open opens its file twice; by descriptor it is the same one even when a new record takes its name.
        with path.open("rb") as stream, safe_open(f"/proc/self/fd/{stream.fileno()}", framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - safe_open is not a mapping
    except (SafetensorError, OSError) as error:
        raise HiddenStatesError(f"{path}: not a readable safetensors file: {error}") from error
    problem = next(_problems(tensors, metadata, finite=finite), None)
    if problem is not None:
        raise HiddenStatesError(f"{path}: {problem}")
    return HiddenStates(path, tensors["token_ids"], tensors["hidden_states"], _layer_ids(metadata), metadata)


def _wait(path: Path, timeout: float) -> None:
    deadline = time.monotonic() + timeout
    pause = _FIRST_PAUSE_S
    while not path.exists():
        if error_path(path).exists():
            reason = read_error(error_path(path))
            raise HiddenStatesError(f"{path}: the engine could not write this record: {reason}")
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError(f"{path}: no record after timeout={timeout} s")
        time.sleep(min(pause, left))
        pause = min(2 * pause, _LONGEST_PAUSE_S)


def _layer_ids(metadata: Mapping[str, str]) -> tuple[int, ...]:
    """Layer ids of a record, empty when the metadata do not say them."""
    try:
        layer_ids = json.loads(metadata["layer_ids"])
    except ValueError:
        return ()
    return tuple(layer_ids) if isinstance(layer_ids, list) and all(type(i) is int for i in layer_ids) else ()


def _problems(tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str], *, finite: bool) -> Iterator[str]:
    """Reasons to refuse a file, cheapest first."""
    missing = [key for key in METADATA_KEYS if key not in metadata]
    if missing:
        yield f"metadata lacks {', '.join(missing)} (not written by ehs?)"
    if metadata["ehs_format"] != FORMAT:
        yield f"ehs_format={metadata['ehs_format']!r}, this version reads {FORMAT!r}"
    if set(tensors) != {"hidden_states", "token_ids"}:
        yield f"tensors {sorted(tensors)}, expected hidden_states and token_ids"
    hidden_states, token_ids = tensors["hidden_states"], tensors["token_ids"]
    num_layers = len(_layer_ids(metadata))
    if not num_layers:
        yield f"layer_ids={metadata['layer_ids']!r} is not a list of integers"
    num_tokens = token_ids.numel()
    if token_ids.ndim != 1 or hidden_states.ndim != 3 or hidden_states.shape[:2] != (num_tokens, num_layers):  # noqa: PLR2004
        yield f"hidden_states {list(hidden_states.shape)} do not fit {num_tokens} tokens and {num_layers} layers"
    dtypes = (str(hidden_states.dtype).removeprefix("torch."), token_ids.dtype)
    if dtypes != (metadata["dtype"], torch.int64):
        yield f"dtypes {dtypes[0]} and {dtypes[1]}, expected {metadata['dtype']} and torch.int64"
    if checksum(metadata, token_ids, hidden_states) != metadata["checksum"]:
        yield "the checksum does not match: the file was altered or damaged after it was written"
    if finite and not hidden_states.isfinite().all():
        token, layer, channel = (~hidden_states.isfinite()).nonzero()[0].tolist()
        yield f"not finite at token {token}, column {layer}, channel {channel}"


@dataclass(frozen=True)
class Inspection:
    """What `ehs inspect` shows of one file: its summary and, when something is wrong with it, what."""

    path: Path
    summary: Mapping[str, Any]
    problem: str | None


def inspect_file(path: Path) -> Inspection:
    """Look at one file without trusting it."""
    try:
        record = read_hidden_states(path, timeout=0)
    except (HiddenStatesError, TimeoutError) as error:
        return Inspection(path, {"bytes": path.stat().st_size if path.exists() else 0}, str(error))
    num_tokens, num_layers, hidden_size = record.hidden_states.shape
    summary = {
        "bytes": path.stat().st_size,
        "num_tokens": num_tokens,
        "num_layers": num_layers,
        "hidden_size": hidden_size,
        **{key: record.metadata[key] for key in METADATA_KEYS},
    }
    return Inspection(path, summary, None)


def inspect_path(path: Path) -> list[Inspection]:
    """Look at a record, or at every record, error marker and leftover of a folder.

    Raises:
        ValueError: there is nothing at `path`, or the folder holds no record.
    """
    if path.is_file():
        return [inspect_file(path)]
    if not path.is_dir():
        raise ValueError(f"path={str(path)!r}: no such file or folder")
    found = [inspect_file(file) for file in sorted(path.glob(f"*{SUFFIX}"))]
    markers = sorted(path.glob(f"*{ERROR_SUFFIX}"))
    found += [Inspection(marker, {}, read_error(marker)) for marker in markers]
    found += [Inspection(file, {}, "left behind by a writer that died") for file in sorted(path.glob(".*.tmp"))]
    if not found:
        raise ValueError(f"path={str(path)!r}: this folder holds no record ({SUFFIX})")
    return found
