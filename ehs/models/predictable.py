# SPDX-License-Identifier: Apache-2.0
# The vLLM side of the predictable model; what its numbers mean stands in ehs/models/code.py.
from collections.abc import Callable, Iterable
from itertools import islice
from typing import Any

import torch
from torch import nn
from vllm.compilation.decorators import support_torch_compile
from vllm.config import VllmConfig
from vllm.distributed import get_pp_group
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.models.interfaces import EagleModelMixin, SupportsEagle3, SupportsPP
from vllm.model_executor.models.utils import make_empty_intermediate_tensors_factory, make_layers, maybe_prefix
from vllm.sequence import IntermediateTensors

from ehs.models import code


class PredictableLayer(nn.Module):
    """A decoder layer with real attention, real KV blocks and no weights.

    Attention runs on the code and adds zero times its output: a NaN that it reads shows in every later state.
    """

    def __init__(self, *, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__()
        config = vllm_config.model_config.hf_config
        tp_size = vllm_config.parallel_config.tensor_parallel_size
        self.num_heads = config.num_attention_heads // tp_size
        self.num_kv_heads = max(1, config.num_key_value_heads // tp_size)
        self.head_dim = config.hidden_size // config.num_attention_heads
        self.layer_id = int(prefix.rsplit(".", 1)[1]) + 1
        self.attn = Attention(
            self.num_heads,
            self.head_dim,
            self.head_dim**-0.5,
            num_kv_heads=self.num_kv_heads,
            cache_config=vllm_config.cache_config,
            prefix=f"{prefix}.attn",
        )

    def forward(
        self,
        # [num_tokens, hidden_size]
        hidden_states: torch.Tensor,
        # [num_tokens, hidden_size]
        residual: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Raise the layer id in the code by one; token and position stay."""
        # [num_tokens, num_heads * head_dim]
        query = (hidden_states + residual)[:, : self.num_heads * self.head_dim] / 256
        key_value = query[:, : self.num_kv_heads * self.head_dim].contiguous()
        nothing = 0 * self.attn(query.contiguous(), key_value, key_value)[:, :1]
        return hidden_states + nothing, code.with_layer_id(residual, self.layer_id)


@support_torch_compile
class PredictableModel(nn.Module, EagleModelMixin):
    """Decoder whose residual stream is the code of (layer id, position, token)."""

    supports_aux_hidden_states_over_pp = True
    # Methods of the mixin, declared for mypy: it sees vLLM as Any and nn.Module's own __getattr__ instead.
    _maybe_add_hidden_state: Callable[..., Any]
    collect_remote_aux_hidden_states: Callable[..., list[torch.Tensor]]
    pack_local_aux_hidden_states: Callable[..., dict[str, torch.Tensor]]

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        self.config = vllm_config.model_config.hf_config
        self.dtype = vllm_config.model_config.dtype
        self.start_layer, self.end_layer, self.layers = make_layers(
            self.config.num_hidden_layers,
            lambda prefix: PredictableLayer(vllm_config=vllm_config, prefix=prefix),
            prefix=f"{prefix}.layers",
        )
        self.make_empty_intermediate_tensors = make_empty_intermediate_tensors_factory(
            ["hidden_states", "residual"], self.config.hidden_size
        )

    def forward(
        self,
        # [num_tokens]
        input_ids: torch.Tensor,
        # [num_tokens]
        positions: torch.Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: torch.Tensor | None = None,
    ) -> Any:
        """Return the last states `[num_tokens, hidden_size]`, and the captured ones in depth order."""
        del inputs_embeds
        aux_hidden_states: list[torch.Tensor] = []
        if get_pp_group().is_first_rank:
            # Split as real models do, so that forgetting the residual shows.
            hidden_states, residual = code.embed(input_ids, positions, self.config.hidden_size, self.dtype)
            self._maybe_add_hidden_state(aux_hidden_states, 0, hidden_states, residual)
        else:
            assert intermediate_tensors is not None
            hidden_states, residual = intermediate_tensors["hidden_states"], intermediate_tensors["residual"]
        remote = self.collect_remote_aux_hidden_states(intermediate_tensors)
        for index, layer in enumerate(islice(self.layers, self.start_layer, self.end_layer), self.start_layer):
            hidden_states, residual = layer(hidden_states, residual)
            self._maybe_add_hidden_state(aux_hidden_states, index + 1, hidden_states, residual)
        if not get_pp_group().is_last_rank:
            relayed = self.pack_local_aux_hidden_states(aux_hidden_states)
            return IntermediateTensors({"hidden_states": hidden_states, "residual": residual, **relayed})
        aux_hidden_states = remote + aux_hidden_states
        last = hidden_states + residual
        return (last, aux_hidden_states) if aux_hidden_states else last


class PredictableForCausalLM(nn.Module, SupportsPP, SupportsEagle3):
    """Position-coded model: every captured state and every next token is known in advance."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        self.config = vllm_config.model_config.hf_config
        self.model = PredictableModel(vllm_config=vllm_config, prefix=maybe_prefix(prefix, "model"))
        self.make_empty_intermediate_tensors = self.model.make_empty_intermediate_tensors

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Not used by the forward pass: the code needs positions too."""
        raise NotImplementedError("the predictable model takes token ids, not embeddings")

    def forward(
        self,
        # [num_tokens]
        input_ids: torch.Tensor,
        # [num_tokens]
        positions: torch.Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: torch.Tensor | None = None,
    ) -> Any:
        """See `PredictableModel.forward`."""
        return self.model(input_ids, positions, intermediate_tensors, inputs_embeds)

    def compute_logits(
        self,
        # [num_tokens, hidden_size]
        hidden_states: torch.Tensor,
    ) -> torch.Tensor:
        """Logits `[num_tokens, vocab_size]` that allow the successors of each row's token and nothing else."""
        return code.next_logits(hidden_states, self.config.vocab_size)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """There are none."""
        del weights
        return set()
