# SPDX-License-Identifier: Apache-2.0
import json
import os
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from vllm.config import VllmConfig, get_layers_from_vllm_config
from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank
from vllm.logger import init_logger
from vllm.model_executor.models.extract_hidden_states import CacheOnlyAttentionLayer
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.request import Request, RequestStatus

from ehs import compat, plugin
from ehs.engine.writer import Writer
from ehs.store import CAPTURE_POINT, error_path, file_name

logger = init_logger(__name__)


@dataclass(frozen=True)
class Save:
    """One finished request whose rows are to be written.

    Attributes:
        request_id: vLLM's internal id.
        path: final file name.
        token_ids: tokens whose states are wanted, all of them computed.
        block_ids: the request's blocks in the hidden-state group, in order.
        num_prompt_tokens: how many of the tokens are the prompt.
    """

    request_id: str
    path: str
    token_ids: tuple[int, ...]
    block_ids: tuple[int, ...]
    num_prompt_tokens: int


@dataclass
class EhsConnectorMetadata(KVConnectorMetadata):
    """What the scheduler half hands to the worker half with the next step."""

    saves: list[Save] = field(default_factory=list)


class EhsConnector(KVConnectorBase_V1, SupportsHMA):
    """Writes the hidden states of each finished request to one file.

    vLLM builds it twice: the scheduler half decides what is written where, the worker half reads the cache and writes.
    """

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        speculative_config = vllm_config.speculative_config
        if speculative_config is None or speculative_config.method != "extract_hidden_states":
            raise ValueError("kv_connector=EhsConnector needs the speculative method extract_hidden_states")
        storage_path = self._kv_transfer_config.get_from_extra_config("shared_storage_path", None)
        if not storage_path:
            raise ValueError("kv_connector_extra_config: shared_storage_path is not set; name the folder for records")
        # Scheduler half
        self._storage_path = Path(storage_path)
        self._saves: list[Save] = []
        if role == KVConnectorRole.SCHEDULER:
            self._group_id = hidden_state_group(kv_cache_config)
        # Worker half
        self._cache: torch.Tensor | None = None
        if role == KVConnectorRole.WORKER:
            self._writer = Writer(int(self._kv_transfer_config.get_from_extra_config("writer_threads", 4)))

    # ---- scheduler half ----

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Nothing is ever loaded."""
        del request, num_computed_tokens
        return 0, False

    def update_state_after_alloc(self, request: Request, blocks: Any, num_external_tokens: int) -> None:
        """Nothing is ever loaded."""

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """Hand over the saves of the requests that finished since the last step."""
        del scheduler_output
        saves, self._saves = self._saves, []
        return EhsConnectorMetadata(saves)

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Decide what of a finished request is written.

        Returns:
            Whether the blocks must be kept until `get_finished` names the request, and what its output carries.
        """
        token_ids = self._wanted_tokens(request)
        if not token_ids:
            return False, None
        path = self._storage_path / file_name(request.request_id)
        # A reader must never take an older run's file for this one. A folder that broke is the writer's to report.
        for older in (path, error_path(path)):
            with suppress(OSError):
                older.unlink(missing_ok=True)
        if os.path.lexists(path):
            logger.error("no record for request %s: the older file %s cannot be removed", request.request_id, path)
            return False, None
        save = Save(request.request_id, str(path), token_ids, tuple(block_ids), request.num_prompt_tokens)
        params = {"hidden_states_path": save.path}
        if has_kv_transfer_group() and isinstance(worker := get_kv_transfer_group(), EhsConnector):
            # The worker half lives in this process: it reads the cache before the blocks are given away. Waiting for
            # the next step would lose the last record of an in-process engine, which makes no further step.
            worker.save(save)
            return False, params
        self._saves.append(save)
        return True, params

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """As `request_finished`, with the blocks of every KV cache group; empty when never scheduled."""
        if self._group_id >= len(block_ids):
            return False, None
        return self.request_finished(request, block_ids[self._group_id])

    def _wanted_tokens(self, request: Request) -> tuple[int, ...]:
        """Tokens to write; none when the request was aborted or a row it would claim was not computed."""
        if request.status == RequestStatus.FINISHED_ABORTED or request.prompt_token_ids is None:
            return ()
        if (request.kv_transfer_params or {}).get("include_output_tokens", False):
            # The last token was sampled but never went through the model.
            token_ids = tuple(request.all_token_ids)[:-1]
        else:
            token_ids = tuple(request.prompt_token_ids)
        return token_ids if request.num_computed_tokens >= len(token_ids) else ()

    # ---- worker half ----

    def get_finished_count(self) -> int:
        """One rank reports each request."""
        return 1

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Remember the hidden-state cache, on the one rank that writes: TP rank 0 of the stage that has the layer."""
        layers = get_layers_from_vllm_config(self._vllm_config, CacheOnlyAttentionLayer, list(kv_caches))
        if layers and get_tensor_model_parallel_rank() == 0:
            (name,) = layers
            # [num_blocks, num_layers, block_size, hidden_size]
            self._cache = kv_caches[name]
            self._engine_metadata = self._describe_engine()

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Nothing is ever loaded."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing is ever loaded."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """The draft model has written the rows; they are read when the request is finished."""

    def wait_for_save(self) -> None:
        """Nothing is in flight between steps."""

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Save what the scheduler half handed over; report each request once, when its blocks may be given away."""
        del finished_req_ids
        if self._cache is None or not self.has_connector_metadata():
            return None, None
        saves = self._get_connector_metadata().saves
        for save in saves:
            self.save(save)
        return {save.request_id for save in saves} or None, None

    def save(self, save: Save) -> None:
        """Read a request's rows from the cache and queue them for writing.

        When this returns, the read is ordered before anything the device does later: the blocks may be given away.
        """
        assert self._cache is not None
        hidden_states = gather(self._cache, save.block_ids, len(save.token_ids))
        ready: Any = lambda: None  # noqa: E731 - the CPU copy is complete
        if hidden_states.is_cuda:
            on_host = torch.empty_like(hidden_states, device="cpu", pin_memory=True)
            on_host.copy_(hidden_states, non_blocking=True)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
            hidden_states, ready = on_host, event.synchronize
        token_ids = torch.tensor(save.token_ids, dtype=torch.int64)
        metadata = {
            **self._engine_metadata,
            "request_id": save.request_id,
            "num_prompt_tokens": str(save.num_prompt_tokens),
        }
        self._writer.submit(Path(save.path), hidden_states, token_ids, metadata, ready)

    def _describe_engine(self) -> dict[str, str]:
        """Metadata that every record of this engine shares."""
        model_config = self._vllm_config.model_config
        hf_config = self._vllm_config.speculative_config.draft_model_config.hf_config
        is_ours = hasattr(hf_config, "ehs_layers")
        layer_ids = hf_config.selection.layer_ids if is_ours else hf_config.eagle_aux_hidden_state_layer_ids
        return {
            "layer_ids": json.dumps(list(layer_ids)),
            "capture_point": CAPTURE_POINT,
            "model": str(model_config.model),
            "revision": str(model_config.revision or ""),
            "dtype": str(model_config.dtype).removeprefix("torch."),
            "engine": " ".join(compat.check_vllm()),
            "runner": "v2" if self._vllm_config.use_v2_model_runner else "v1",
            "speculator": plugin.live_speculator() or hf_config.ehs_speculator,
            "positions": "all",
        }

    def shutdown(self) -> None:
        """Wait for the writer, so that nothing already read is lost."""
        if self.role == KVConnectorRole.WORKER:
            self._writer.close()

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        """Token-major blocks: the layers of one token lie together, as in the file."""
        del vllm_config
        return "LBNHC"


def hidden_state_group(kv_cache_config: KVCacheConfig) -> int:
    """Index of the KV cache group that holds the cache-only layer.

    Found by layer name: the group's spec is not a safe mark, as a group may be shared with attention layers and the
    scheduler sees a merged spec.

    Raises:
        ValueError: there is not exactly one.
    """
    names = [group.layer_names for group in kv_cache_config.kv_cache_groups]
    found = [index for index, group in enumerate(names) if any("cache_only_layers." in name for name in group)]
    if not found and len(names) == 1:
        # Under pipeline parallelism the scheduler sees the first stage's layers; the blocks are those of all stages.
        return 0
    if len(found) != 1:
        raise ValueError(f"kv_cache_groups: {len(found)} of {len(names)} groups hold the cache-only layer, expected 1")
    return found[0]


def gather(
    # [num_blocks, num_layers, block_size, hidden_size]
    cache: torch.Tensor,
    block_ids: tuple[int, ...],
    num_tokens: int,
) -> torch.Tensor:
    """Copy a request's first `num_tokens` rows out of its blocks: `[num_tokens, num_layers, hidden_size]`."""
    block_size = cache.shape[2]
    blocks = torch.tensor(block_ids[: -(-num_tokens // block_size)], device=cache.device)
    rows = torch.arange(num_tokens, device=cache.device)
    return cache[blocks[rows // block_size], :, rows % block_size]
