# SPDX-License-Identifier: Apache-2.0
import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from ehs.models import code
from ehs.verify.metrics import rms


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
            self._cache[key] = self.run(key)
        return self._cache[key]

    @torch.inference_mode()
    def run(self, token_ids: Sequence[int], seed: int | None = None) -> torch.Tensor:
        """As `states`, computed anew; with a seed, every number the first layer receives is moved by up to one ulp."""
        layers = decoder_layers(self.model)
        captured: dict[int, torch.Tensor] = {}

        def before_first(_module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            hidden_states = args[0] if args else kwargs["hidden_states"]
            if seed is not None:
                hidden_states = move_by_ulp(hidden_states, seed)
            captured[0] = hidden_states[0].float()
            return ((hidden_states, *args[1:]), kwargs) if args else ((), {**kwargs, "hidden_states": hidden_states})

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


class Baseline:
    """How far the reference model strays from its own fp32 states when it runs in a 16-bit dtype.

    One run is one draw of rounding noise and can be small at a token by accident, above all where a few huge channels
    rule the row (seen: SmolLM2 bf16, 0.07 % at a first token whose error under a one-ulp move of the input is 0.55 %).
    So the error at each layer id and token is the largest of several runs: the plain one, then up to NUM_MOVED with the
    input moved by at most one ulp, an input the dtype cannot tell from the true one.

    Args:
        truth: the model in fp32.
        reduced: the model in the engine's dtype.
    """

    NUM_MOVED = 12

    def __init__(self, truth: Reference, reduced: Reference) -> None:
        self.truth = truth
        self.reduced = reduced
        self._runs: dict[tuple[int, ...], list[torch.Tensor]] = {}

    def own_errors(self, token_ids: Sequence[int]) -> Iterator[torch.Tensor]:
        """Yield the RMS error `[num_tokens, N + 1]`, fp64, after one run, after two, ...: it only grows.

        A caller that is satisfied stops early; its verdict is the one it would reach with all runs.
        """
        runs = self._runs.setdefault(tuple(token_ids), [])
        for index in range(self.NUM_MOVED + 1):
            if index == len(runs):
                states = self.reduced.run(token_ids, seed=index or None)
                error = rms(states.double() - self.truth.states(token_ids).double())
                if index:
                    # The moved input is no error of the model.
                    error[:, 0] = 0
                    error = torch.maximum(error, runs[-1])
                runs.append(error)
            yield runs[index]


def move_by_ulp(hidden_states: torch.Tensor, seed: int) -> torch.Tensor:
    """Move every number at random by at most one unit in its last place."""
    generator = torch.Generator().manual_seed(seed)
    noise = (2 * torch.rand(hidden_states.shape, generator=generator) - 1) * torch.finfo(hidden_states.dtype).eps / 2
    return (hidden_states.float() * (1 + noise)).to(hidden_states.dtype)


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
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ValueError(
            f"model={model!r}: its config.json cannot be read{offline}: {reason}; use a name that "
            "`ehs verify --help` lists, a local folder, or an id the hub serves to this machine"
        ) from error
    config = config.get("text_config", config) if isinstance(config, dict) else {}
    if "num_hidden_layers" not in config:
        raise ValueError(f"model={model!r}: its config.json names no num_hidden_layers")
    return dict(config)
