# SPDX-License-Identifier: Apache-2.0
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from ehs.models import code


class Reference:
    """Residual stream of a Hugging Face model, read by forward hooks, in one dtype on the CPU.

    Layer 0 is what the first decoder layer receives, k what layer k-1 returns: before the final norm, unlike
    `output_hidden_states[-1]`.

    Args:
        model: folder or Hugging Face id.
        dtype: "float32", "bfloat16" or "float16".
    """

    def __init__(self, model: str, dtype: str) -> None:
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype)).eval()
        self._cache: dict[tuple[int, ...], torch.Tensor] = {}

    def states(self, token_ids: Sequence[int]) -> torch.Tensor:
        """States of every layer id 0..N: `[num_tokens, N + 1, hidden_size]`, fp32; kept for the next call."""
        key = tuple(token_ids)
        if key not in self._cache:
            self._cache[key] = self._run(key)
        return self._cache[key]

    @torch.inference_mode()
    def _run(self, token_ids: tuple[int, ...]) -> torch.Tensor:
        layers = decoder_layers(self.model)
        captured: dict[int, torch.Tensor] = {}

        def before_first(_module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            captured[0] = (args[0] if args else kwargs["hidden_states"])[0].float()

        def after(layer_id: int) -> Callable[..., None]:
            def hook(_module: Any, _args: Any, output: Any) -> None:
                captured[layer_id] = (output[0] if isinstance(output, tuple) else output)[0].float()

            return hook

        handles = [layers[0].register_forward_pre_hook(before_first, with_kwargs=True)]
        handles += [layer.register_forward_hook(after(index + 1)) for index, layer in enumerate(layers)]
        try:
            self.model(input_ids=torch.tensor([token_ids]), use_cache=False)
        finally:
            for handle in handles:
                handle.remove()
        return torch.stack([captured[layer_id] for layer_id in range(len(layers) + 1)], dim=1)


class PredictableReference:
    """The predictable model's states, by arithmetic; same interface as `Reference`."""

    def __init__(self, hidden_size: int, num_hidden_layers: int) -> None:
        self.hidden_size = hidden_size
        self.num_hidden_layers = num_hidden_layers

    def states(self, token_ids: Sequence[int]) -> torch.Tensor:
        """States of every layer id 0..N: `[num_tokens, N + 1, hidden_size]`, fp32."""
        return code.expected(torch.tensor(token_ids), range(self.num_hidden_layers + 1), self.hidden_size).float()


def decoder_layers(model: torch.nn.Module) -> torch.nn.ModuleList:
    """The list of decoder layers of a causal language model.

    Raises:
        ValueError: none or several lists have as many entries as the model has layers.
    """
    config: Any = model.config
    num_layers = config.get_text_config().num_hidden_layers
    found = [
        module for module in model.modules() if isinstance(module, torch.nn.ModuleList) and len(module) == num_layers
    ]
    if len(found) != 1:
        raise ValueError(f"{type(model).__name__}: {len(found)} module lists have {num_layers} entries, expected 1")
    return found[0]


def read_model_config(model: str) -> dict[str, Any]:
    """`config.json` of a folder or a Hugging Face id, its text part when there is one.

    Raises:
        ValueError: it cannot be read, or names no layers.
    """
    try:
        if Path(model).is_dir():
            config = json.loads((Path(model) / "config.json").read_text())
        else:
            from huggingface_hub import hf_hub_download

            config = json.loads(Path(hf_hub_download(model, "config.json")).read_text())
    except Exception as error:
        offline = " (HF_HUB_OFFLINE is set)" if os.environ.get("HF_HUB_OFFLINE") == "1" else ""
        raise ValueError(
            f"model={model!r}: its config.json cannot be read{offline}: {str(error).splitlines()[0]}; use a name that "
            "`ehs verify --help` lists, a local folder, or an id the hub serves to this machine"
        ) from error
    config = config.get("text_config", config)
    if "num_hidden_layers" not in config:
        raise ValueError(f"model={model!r}: its config.json names no num_hidden_layers")
    return dict(config)
