# SPDX-License-Identifier: Apache-2.0
from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.forward_context import get_forward_context
from vllm.model_executor.models.extract_hidden_states import CacheOnlyAttentionLayer, dummy_attention
from vllm.model_executor.models.interfaces import SupportsPP
from vllm.model_executor.models.utils import make_empty_intermediate_tensors_factory, maybe_prefix
from vllm.sequence import IntermediateTensors
from vllm.utils.torch_utils import is_quantized_kv_cache

from ehs.engine.cache_write import write_hidden_states


class EhsHiddenStatesModel(nn.Module, SupportsPP):
    """Draft model without weights: one cache-only layer whose heads are the layers asked for, in that order.

    It sits on the last pipeline stage alone; what SupportsPP wants of it is there because vLLM checks every model.
    """

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        if not vllm_config.use_v2_model_runner:
            raise ValueError(
                "speculator='ehs' needs Model Runner V2, and vLLM chose V1: set VLLM_USE_V2_MODEL_RUNNER=1 (without a "
                "GPU call ehs.cpu_backend.environment.set_environment first), or use speculator='upstream'"
            )
        selection = vllm_config.speculative_config.draft_model_config.hf_config.selection
        self.sources = selection.sources
        self.num_captured = len(selection.captured)
        cache_config = vllm_config.cache_config
        if is_quantized_kv_cache(cache_config.cache_dtype):
            # States keep the model's dtype whatever the target's KV cache is squeezed into.
            cache_config = replace(cache_config, cache_dtype="auto")
        # Numbered behind the target's layers, as the runner sorts layers by the number in their name.
        name = f"cache_only_layers.{selection.num_hidden_layers}"
        self.layer = CacheOnlyAttentionLayer(
            num_heads=len(selection.layer_ids),
            head_size=vllm_config.model_config.get_hidden_size(),
            cache_config=cache_config,
            prefix=maybe_prefix(prefix, name),
        )
        self.make_empty_intermediate_tensors = make_empty_intermediate_tensors_factory([], self.layer.head_size)

    def forward(
        self,
        # num_captured x [num_tokens, hidden_size]
        aux_hidden_states: list[torch.Tensor],
        intermediate_tensors: IntermediateTensors | None = None,
    ) -> None:
        """Write the states to the cache, where this step's forward context says.

        Raises:
            ValueError: the target model returned another number of layers than was captured.
        """
        del intermediate_tensors
        if len(aux_hidden_states) != self.num_captured:
            raise ValueError(
                f"the target model returned {len(aux_hidden_states)} auxiliary hidden states for {self.num_captured} "
                "captured layers: its class does not honour the layer ids it was given"
            )
        name = self.layer.layer_name
        slot_mapping = get_forward_context().slot_mapping[name]
        write_hidden_states(aux_hidden_states, self.layer.kv_cache, slot_mapping, self.sources)
        # Connectors with a hook per layer are called through this.
        dummy_attention(name, None)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Nothing to load."""
        del weights
        return set()
