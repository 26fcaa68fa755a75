# SPDX-License-Identifier: Apache-2.0
from typing import Any

import torch
from torch import nn
from vllm.compilation.backends import set_model_tag
from vllm.config import VllmConfig
from vllm.config.compilation import CUDAGraphMode
from vllm.forward_context import set_forward_context
from vllm.model_executor.model_loader import get_model
from vllm.v1.worker.gpu.dp_utils import DPSyncState
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.spec_decode.speculator import DraftModelSpeculator


class ExtractHiddenStatesSpeculator(DraftModelSpeculator):
    """Keeps the target's hidden states in the draft model's cache; its drafts repeat the last sampled token."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        super().__init__(vllm_config, device)
        config = self.speculative_config
        # setting, value, what is allowed
        for setting, value, allowed in (
            ("draft_sample_method", config.draft_sample_method, "greedy"),
            ("num_speculative_tokens", config.num_speculative_tokens, 1),
            ("disable_padded_drafter_batch", config.disable_padded_drafter_batch, False),
        ):
            if value != allowed:
                raise ValueError(f"{setting}={value!r}: the method extract_hidden_states allows {allowed!r} only")

    def load_draft_model(self, target_model: nn.Module, target_attn_layer_names: set[str]) -> nn.Module:
        """Build the cache-only draft model; there are no weights to load."""
        del target_model, target_attn_layer_names
        with set_model_tag("extract_hidden_states"):
            model: nn.Module = get_model(vllm_config=self.vllm_config, model_config=self.draft_model_config)
        return model

    def init_cudagraph_manager(self, cudagraph_mode: CUDAGraphMode) -> None:
        """Nothing to set up: the cache write is not captured."""
        del cudagraph_mode

    def capture(self) -> None:
        """Nothing to capture."""

    @torch.inference_mode()
    def propose(
        self,
        input_batch: InputBatch,
        attn_metadata: dict[str, Any],
        slot_mappings: dict[str, torch.Tensor],
        # [num_tokens, hidden_size]
        last_hidden_states: torch.Tensor,
        # num_captured x [num_tokens, hidden_size]
        aux_hidden_states: list[torch.Tensor] | None,
        # [num_reqs]
        num_sampled: torch.Tensor,
        # [num_reqs]
        num_rejected: torch.Tensor,
        # [max_num_reqs, 1]
        last_sampled: torch.Tensor,
        # [num_prefill_lookahead, max_num_reqs]
        next_prefill_tokens: torch.Tensor,
        # [max_num_reqs]
        temperature: torch.Tensor,
        # [max_num_reqs]
        seeds: torch.Tensor,
        dp_sync_state: DPSyncState | None = None,
        dummy_run: bool = False,  # noqa: FBT001, FBT002 - upstream's interface
        skip_attn_for_dummy_run: bool = False,  # noqa: FBT001, FBT002
        mm_inputs: tuple[list[torch.Tensor], torch.Tensor] | None = None,
        is_profile: bool = False,  # noqa: FBT001, FBT002
        num_speculative_tokens: int | None = None,
    ) -> torch.Tensor:
        """Write this step's states to the cache.

        Returns:
            Draft tokens `[num_reqs, 1]`: each request's last sampled token.

        Raises:
            ValueError: the target returned no auxiliary states, or another number of them than was captured.
        """
        del (
            last_hidden_states,
            num_sampled,
            num_rejected,
            next_prefill_tokens,
            temperature,
            seeds,
            dummy_run,
            mm_inputs,
            is_profile,
            num_speculative_tokens,
        )
        draft_tokens = last_sampled[input_batch.idx_mapping, :1]
        if skip_attn_for_dummy_run:
            return draft_tokens
        if aux_hidden_states is None:
            raise ValueError("aux_hidden_states=None: the target model captured no layer")

        num_tokens = aux_hidden_states[0].shape[0]
        names = self.draft_attn_layer_names
        with set_forward_context(
            {name: attn_metadata[name] for name in names},
            self.vllm_config,
            num_tokens=num_tokens,
            num_tokens_across_dp=dp_sync_state and dp_sync_state.num_tokens_across_dp,
            cudagraph_runtime_mode=CUDAGraphMode.NONE,
            slot_mapping={name: slot_mappings[name][:num_tokens] for name in names},
            is_padding=input_batch.is_padding[:num_tokens],
        ):
            self.model(aux_hidden_states)
        return draft_tokens
