# SPDX-License-Identifier: Apache-2.0
# Everything that needs vLLM, with its real classes and configurations but without an engine.
import copy
import inspect
import pickle
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import safetensors
import torch
from hypothesis import given
from hypothesis import strategies as st

from ehs import ExtractionConfig, compat, plugin
from ehs.compat import PROPOSE_PARAMETERS, UnsupportedVllmError, check_speculator
from ehs.cpu_backend.environment import Device, set_environment
from ehs.engine.cache_write import write_hidden_states
from ehs.layers import LayerSelection
from ehs.store import METADATA_KEYS, file_name, read_hidden_states, write_error
from ehs.verify.faults import FAULTS

set_environment(Device("cpu", "test", "test"))
# Before vLLM is imported, the environment must be set.
import vllm  # noqa: E402
from vllm.config import set_current_vllm_config  # noqa: E402
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole  # noqa: E402
from vllm.engine.arg_utils import EngineArgs  # noqa: E402
from vllm.model_executor.models import registry  # noqa: E402
from vllm.transformers_utils.configs import extract_hidden_states as config_module  # noqa: E402
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec  # noqa: E402
from vllm.v1.request import Request, RequestStatus  # noqa: E402
from vllm.v1.worker.gpu.model_runner import GPUModelRunner  # noqa: E402
from vllm.v1.worker.gpu.spec_decode import extract_hidden_states as speculator_module  # noqa: E402

from ehs.engine import connector as connector_module  # noqa: E402
from ehs.engine import draft_config, draft_model, session  # noqa: E402
from ehs.engine.connector import EhsConnector, gather, hidden_state_group  # noqa: E402
from ehs.engine.draft_config import HiddenStatesConfig  # noqa: E402
from ehs.engine.draft_model import EhsHiddenStatesModel  # noqa: E402
from ehs.engine.speculator import ExtractHiddenStatesSpeculator  # noqa: E402

CPU = torch.device("cpu")
BLOCK_SIZE, HIDDEN_SIZE, NUM_BLOCKS = 32, 128, 6


@pytest.fixture(autouse=True, scope="module")
def _plugin(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        # vLLM looks at each model class in a process of its own, for 8 s, and keeps what it saw in its cache.
        patch.setattr(registry, "_run_in_subprocess", lambda look: look())
        patch.setenv("VLLM_CACHE_ROOT", str(tmp_path_factory.mktemp("vllm")))
        plugin.register()
        yield


def engine_config(
    model: Path, storage: Path, layers: list[int], engine: dict[str, Any] | None = None, **own: Any
) -> Any:
    arguments = ExtractionConfig(layers=tuple(layers), storage_path=storage, **own).engine_args()
    speculative = (engine or {}).pop("speculative", {})
    arguments["speculative_config"] |= speculative
    if speculative:
        arguments["speculative_config"].pop("num_speculative_tokens_per_batch_size")
    known = {"dtype": "float32", "max_model_len": 256, "block_size": BLOCK_SIZE}
    return EngineArgs(model=str(model), **(known | (engine or {})), **arguments).create_engine_config()


@pytest.fixture
def config_for(predictable: Path, tmp_path: Path) -> Callable[..., Any]:
    """Engine configuration, as vLLM makes it from the arguments of an ExtractionConfig."""

    def build(layers: list[int], engine: dict[str, Any] | None = None, **own: Any) -> Any:
        return engine_config(predictable, tmp_path / "records", layers, engine, **own)

    return build


# ---- plugin ----


def test_registering_again_finds_nothing_to_do() -> None:
    upstream = speculator_module.upstream_speculator
    for _ in range(2):
        plugin.register()
        assert speculator_module.ExtractHiddenStatesSpeculator is plugin.make_speculator
        assert speculator_module.upstream_speculator is upstream
        assert upstream.__module__.startswith("vllm.")
        assert config_module.ExtractHiddenStatesConfig is HiddenStatesConfig
    assert set(plugin.MODEL_ARCHITECTURES) <= set(vllm.ModelRegistry.get_supported_archs())


def test_a_vllm_with_another_speculator_interface_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    class Newer:
        def propose(self, input_batch: object) -> None:
            """Has other parameters."""

    monkeypatch.delattr(speculator_module, "upstream_speculator")
    monkeypatch.setattr(speculator_module, "ExtractHiddenStatesSpeculator", Newer)
    with pytest.raises(UnsupportedVllmError, match=rf"ehs .* does not fit vLLM {compat.check_vllm()[1]}.* seeds"):
        plugin.register()
    assert speculator_module.ExtractHiddenStatesSpeculator is Newer


def test_a_vllm_of_unknown_version_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config_module, "ExtractHiddenStatesConfig", "untouched")
    monkeypatch.setattr(compat, "find_vllm", lambda: ("vllm", "0.99.0"))
    with pytest.raises(UnsupportedVllmError, match=r"0\.99\.0"):
        plugin.register()
    assert config_module.ExtractHiddenStatesConfig == "untouched"


def test_our_speculator_has_the_interface_of_the_one_it_replaces() -> None:
    upstream = speculator_module.upstream_speculator
    check_speculator(upstream.propose)
    assert tuple(inspect.signature(ExtractHiddenStatesSpeculator.propose).parameters) == PROPOSE_PARAMETERS
    theirs, ours = (
        inspect.signature(one.propose).parameters.values() for one in (upstream, ExtractHiddenStatesSpeculator)
    )
    assert [parameter.default for parameter in ours] == [parameter.default for parameter in theirs]


@pytest.mark.parametrize(
    ("speculator", "module"), [("ehs", "ehs.engine.speculator"), ("upstream", "vllm.v1.worker.gpu.spec_decode")]
)
def test_the_configuration_picks_the_speculator_and_the_process_knows_which_is_live(
    config_for: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, speculator: str, module: str
) -> None:
    monkeypatch.setattr(plugin, "_live", [])
    assert plugin.live_speculator() is None
    config = config_for([2, 6], speculator=speculator)
    with set_current_vllm_config(config):
        built = plugin.make_speculator(config, CPU)
    assert type(built).__module__.startswith(module)
    assert plugin.live_speculator() == f"{type(built).__module__}.ExtractHiddenStatesSpeculator"


def test_a_runner_is_told_by_its_class_and_not_by_its_name() -> None:
    impostor = type("GPUModelRunner", (), {})()
    assert compat.runner_version(GPUModelRunner.__new__(GPUModelRunner)) == "v2"
    assert compat.runner_version(impostor) == "v1"


# ---- configuration ----


def draft_of(config: Any) -> Any:
    return config.speculative_config.draft_model_config.hf_config


def test_vllm_captures_in_depth_order_and_what_was_asked_for_is_kept(config_for: Callable[..., Any]) -> None:
    config = config_for([5, -1, 0, 5])
    draft = draft_of(config)
    assert draft.eagle_aux_hidden_state_layer_ids == [0, 5, 6]
    assert (draft.selection.layer_ids, draft.selection.sources) == ((5, 6, 0, 5), (1, 2, 0, 1))
    assert draft.architectures == ["EhsHiddenStatesModel"]
    assert config.use_v2_model_runner


@pytest.mark.parametrize(
    "travel",
    [
        copy.deepcopy,
        lambda config: pickle.loads(pickle.dumps(config)),  # noqa: S301 - as vLLM sends it to its workers
        lambda config: type(config)(**config.to_dict()),
        lambda config: type(config).from_dict(config.to_dict()),
    ],
)
def test_the_layers_survive_every_way_a_configuration_travels(
    config_for: Callable[..., Any], travel: Callable[[Any], Any]
) -> None:
    draft = travel(draft_of(config_for([-1, 3, 3])))
    assert draft.selection.layer_ids == (6, 3, 3)
    assert draft.eagle_aux_hidden_state_layer_ids == [3, 6]


@pytest.mark.parametrize("layer", [7, -8])
def test_a_layer_that_the_model_lacks_is_refused_before_anything_is_loaded(
    config_for: Callable[..., Any], layer: int
) -> None:
    with pytest.raises(ValueError, match=rf"layer id {layer} is out of range, this model has ids 0 to 6"):
        config_for([0, layer])


def test_upstream_gets_its_configuration_untouched(config_for: Callable[..., Any]) -> None:
    draft = draft_of(config_for([6, 2, 2], speculator="upstream"))
    assert draft.eagle_aux_hidden_state_layer_ids == [6, 2, 2]
    assert draft.architectures == ["ExtractHiddenStatesModel"]


def test_a_configuration_without_layers_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one layer"):
        HiddenStatesConfig({"num_hidden_layers": 4})


@pytest.mark.parametrize(("policy", "schedule"), [("none", 0), ("repeat", None)])
def test_vllm_accepts_the_draft_policy(config_for: Callable[..., Any], policy: str, schedule: int | None) -> None:
    planned = config_for([1], draft_policy=policy).speculative_config.num_speculative_tokens_per_batch_size
    assert [entry[-1] for entry in planned or [(None,)]] == [schedule]


@pytest.mark.parametrize(
    ("setting", "value"),
    [("num_speculative_tokens", 2), ("draft_sample_method", "probabilistic"), ("disable_padded_drafter_batch", True)],
)
def test_settings_the_method_does_not_allow_are_refused_by_name(
    config_for: Callable[..., Any], setting: str, value: object
) -> None:
    config = config_for([1], {"speculative": {setting: value}})
    with set_current_vllm_config(config), pytest.raises(ValueError, match=f"{setting}={value!r}"):
        plugin.make_speculator(config, CPU)


# ---- from the model's states to the cache ----


class Engine:
    """The parts of one engine that the states pass through, on a cache full of canaries."""

    def __init__(self, config: Any) -> None:
        self.config = config
        with set_current_vllm_config(config):
            self.model = EhsHiddenStatesModel(vllm_config=config, prefix="draft")
            self.speculator = plugin.make_speculator(config, CPU)
        self.name = self.model.layer.layer_name
        self.speculator.model = self.model
        self.speculator.draft_attn_layer_names = {self.name}
        num_columns = len(draft_of(config).selection.layer_ids)
        # Token-major, as the connector asks for.
        memory = torch.full((NUM_BLOCKS, BLOCK_SIZE, num_columns, HIDDEN_SIZE), -77.0)
        self.cache = memory.permute(0, 2, 1, 3)
        self.model.layer.kv_cache = self.cache

    def propose(self, aux: list[torch.Tensor] | None, slots: list[int], *, dummy: bool = False) -> torch.Tensor:
        num_tokens = len(aux[0]) if aux else 0
        batch = SimpleNamespace(idx_mapping=torch.tensor([2, 0]), is_padding=torch.zeros(99, dtype=torch.bool))
        with set_current_vllm_config(self.config):
            drafts: torch.Tensor = self.speculator.propose(
                input_batch=batch,
                attn_metadata={self.name: None},
                # The runner's buffers are longer than the step.
                slot_mappings={self.name: torch.tensor([*slots, *range(200 - num_tokens)])},
                last_hidden_states=torch.zeros(num_tokens, HIDDEN_SIZE),
                aux_hidden_states=aux,
                num_sampled=None,
                num_rejected=None,
                last_sampled=torch.tensor([[70], [71], [72]]),
                next_prefill_tokens=None,
                temperature=None,
                seeds=None,
                skip_attn_for_dummy_run=dummy,
            )
        return drafts

    def kv_cache_config(self) -> Any:
        spec = self.model.layer.get_kv_cache_spec(self.config)
        groups = [KVCacheGroupSpec(["model.layers.0.attn"], None), KVCacheGroupSpec([self.name], spec)]
        return KVCacheConfig(num_blocks=NUM_BLOCKS, kv_cache_tensors=[], kv_cache_groups=groups)


@pytest.fixture
def engine(config_for: Callable[..., Any]) -> Engine:
    return Engine(config_for([5, 2, 5]))


def states(num_layers: int, num_tokens: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(num_tokens)
    return [torch.randn(num_tokens, HIDDEN_SIZE, generator=generator) for _ in range(num_layers)]


def test_a_step_writes_each_layer_to_the_columns_that_asked_for_it_and_drafts_the_last_token(engine: Engine) -> None:
    layer_2, layer_5 = states(2, 4)
    wanted = engine.cache.clone()
    for token, slot in enumerate((40, 41, 95)):
        block, offset = divmod(slot, BLOCK_SIZE)
        wanted[block, :, offset] = torch.stack([layer_5[token], layer_2[token], layer_5[token]])
    drafts = engine.propose([layer_2, layer_5], [40, 41, 95, -1])
    assert drafts.tolist() == [[72], [70]]
    assert torch.equal(engine.cache[1:], wanted[1:])


def test_a_dummy_step_without_attention_writes_nothing(engine: Engine) -> None:
    before = engine.cache.clone()
    assert engine.propose(states(2, 4), [40, 41, 42, 43], dummy=True).tolist() == [[72], [70]]
    assert torch.equal(engine.cache, before)


@pytest.mark.parametrize(
    ("num_layers", "said"), [(None, "captured no layer"), (1, "1 auxiliary .* for 2"), (3, "3 auxiliary .* for 2")]
)
def test_a_model_that_returns_other_layers_than_captured_is_an_error(
    engine: Engine, num_layers: int | None, said: str
) -> None:
    before = engine.cache.clone()
    with pytest.raises(ValueError, match=said):
        engine.propose((num_layers and states(num_layers, 2)) or None, [40, 41])
    assert torch.equal(engine.cache, before)


def test_states_keep_their_dtype_when_the_target_s_cache_is_quantized(config_for: Callable[..., Any]) -> None:
    config = config_for([1, 2], {"dtype": "bfloat16"})
    config.cache_config.cache_dtype = "fp8"
    assert Engine(config).model.layer.kv_cache_torch_dtype == torch.bfloat16


def test_the_first_runner_is_refused_with_what_to_do(config_for: Callable[..., Any], environ: dict[str, str]) -> None:
    environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"
    config = config_for([1])
    with set_current_vllm_config(config), pytest.raises(ValueError, match="VLLM_USE_V2_MODEL_RUNNER=1"):
        EhsHiddenStatesModel(vllm_config=config)


@given(
    block_size=st.sampled_from([1, 3, 16]),
    num_tokens=st.integers(1, 40),
    sources=st.lists(st.integers(0, 2), min_size=1, max_size=4),
    order=st.permutations(range(1, 60)),
    token_major=st.booleans(),
)
def test_gathering_gives_back_what_was_written(
    *, block_size: int, num_tokens: int, sources: list[int], order: list[int], token_major: bool
) -> None:
    # A preempted request may hold more blocks than its tokens need.
    block_ids = tuple(order[: -(-num_tokens // block_size) + 2])
    shape = (60, len(sources), block_size, 5)
    cache = torch.full(shape, -77.0)
    if token_major:
        cache = torch.full((60, block_size, len(sources), 5), -77.0).permute(0, 2, 1, 3)
    aux = [torch.randn(num_tokens, 5) for _ in range(3)]
    slots = [block_ids[token // block_size] * block_size + token % block_size for token in range(num_tokens)]
    write_hidden_states(aux, cache, torch.tensor(slots), sources)
    rows = gather(cache, block_ids, num_tokens)
    assert rows.is_contiguous()
    assert torch.equal(rows, torch.stack([aux[source] for source in sources], dim=1))
    # A copy: the blocks are given away while it is written.
    cache.fill_(0)
    assert torch.equal(rows[:, 0], aux[sources[0]])


# ---- connector, scheduler half ----


def scheduler_half(engine: Engine) -> EhsConnector:
    return EhsConnector(engine.config, KVConnectorRole.SCHEDULER, engine.kv_cache_config())


@pytest.fixture
def scheduler(engine: Engine) -> EhsConnector:
    return scheduler_half(engine)


def finished(
    request_id: str = "7-abc",
    prompt: tuple[int, ...] | None = tuple(range(10, 50)),
    outputs: tuple[int, ...] = (1, 2, 3),
    **params: Any,
) -> Any:
    """A request that ended well: every token but the last sampled one went through the model."""
    sampling = vllm.SamplingParams(max_tokens=9, extra_args={"kv_transfer_params": params} if params else None)
    embeds = None if prompt else torch.zeros(4, HIDDEN_SIZE)
    request = Request(request_id, list(prompt) if prompt else None, sampling, None, prompt_embeds=embeds)
    request.append_output_token_ids(list(outputs))
    request.num_computed_tokens = request.num_tokens - 1
    request.status = RequestStatus.FINISHED_LENGTH_CAPPED
    return request


def saves(scheduler: EhsConnector) -> list[Any]:
    return list(scheduler.build_connector_meta(None).saves)


def test_a_finished_request_is_handed_to_the_worker_once_and_keeps_its_blocks_until_then(
    scheduler: EhsConnector, tmp_path: Path
) -> None:
    keep, params = scheduler.request_finished_all_groups(finished(), ([9, 9], [3, 1]))
    path = tmp_path / "records" / "7-abc.safetensors"
    assert keep
    assert params == {"hidden_states_path": str(path)}
    (save,) = saves(scheduler)
    assert (save.request_id, save.path, save.block_ids) == ("7-abc", str(path), (3, 1))
    assert (save.token_ids, save.num_prompt_tokens) == (tuple(range(10, 50)), 40)
    assert saves(scheduler) == []


def test_output_tokens_are_recorded_when_asked_for_without_the_last(scheduler: EhsConnector) -> None:
    scheduler.request_finished(finished(include_output_tokens=True), [3, 1])
    (save,) = saves(scheduler)
    assert save.token_ids == (*range(10, 50), 1, 2)
    assert save.num_prompt_tokens == 40


def changed(**attributes: Any) -> Any:
    request = finished(include_output_tokens=True)
    for name, value in attributes.items():
        setattr(request, name, value)
    return request


@pytest.mark.parametrize(
    "request_",
    [
        pytest.param(lambda: changed(status=RequestStatus.FINISHED_ABORTED), id="aborted"),
        pytest.param(lambda: changed(num_computed_tokens=41), id="one row short"),
        pytest.param(lambda: changed(num_computed_tokens=0), id="preempted"),
        pytest.param(lambda: finished(prompt=None), id="prompt of embeddings"),
    ],
)
def test_a_request_whose_rows_are_not_all_there_gives_no_record(
    scheduler: EhsConnector, request_: Callable[[], Any]
) -> None:
    assert scheduler.request_finished(request_(), [3, 1]) == (False, None)
    assert saves(scheduler) == []


def test_the_last_row_needed_is_enough(scheduler: EhsConnector) -> None:
    keep, _ = scheduler.request_finished(changed(num_computed_tokens=42), [3, 1])
    assert keep


def test_a_request_that_was_never_scheduled_gives_no_record(scheduler: EhsConnector) -> None:
    assert scheduler.request_finished_all_groups(finished(), ()) == (False, None)


def test_what_an_older_run_left_under_the_name_is_gone_before_the_path_is_told(
    scheduler: EhsConnector, tmp_path: Path
) -> None:
    folder = tmp_path / "records"
    folder.mkdir()
    path = folder / "7-abc.safetensors"
    path.write_text("older")
    write_error(path, "older")
    (folder / "other.safetensors").write_text("not ours")
    scheduler.request_finished(finished(), [3, 1])
    assert [file.name for file in folder.iterdir()] == ["other.safetensors"]


@given(st.text(st.characters(codec=None), max_size=40) | st.sampled_from(["", "..", "../../x", "/etc/passwd", "a\0b"]))
def test_no_request_id_leads_out_of_the_storage_folder(request_id: str) -> None:
    scheduler = EhsConnector.__new__(EhsConnector)
    scheduler._storage_path, scheduler._saves = Path("/nowhere/records"), []
    _, params = scheduler.request_finished(finished(request_id), [3, 1])
    path = Path((params or {})["hidden_states_path"])
    assert path.parent == Path("/nowhere/records")
    assert path == path.resolve()


@pytest.mark.parametrize("role", [KVConnectorRole.SCHEDULER, KVConnectorRole.WORKER])
def test_a_connector_without_its_speculator_or_its_folder_is_refused(engine: Engine, role: Any) -> None:
    groups = engine.kv_cache_config()
    engine.config.kv_transfer_config.kv_connector_extra_config = {}
    with pytest.raises(ValueError, match="shared_storage_path"):
        EhsConnector(engine.config, role, groups)
    engine.config.speculative_config = None
    with pytest.raises(ValueError, match="extract_hidden_states"):
        EhsConnector(engine.config, role, groups)


def groups(*names: list[str]) -> Any:
    specs = [KVCacheGroupSpec(layers, None) for layers in names]
    return KVCacheConfig(num_blocks=4, kv_cache_tensors=[], kv_cache_groups=specs)


def test_the_group_of_the_states_is_found_by_its_layer_wherever_it_is() -> None:
    attention, ours = ["model.layers.0.attn"], ["draft.cache_only_layers.6"]
    assert hidden_state_group(groups(attention, ours)) == 1
    assert hidden_state_group(groups(ours, attention, attention)) == 0
    # A group may be shared with attention layers of the same page size.
    assert hidden_state_group(groups(attention, attention + ours)) == 1
    # Under pipeline parallelism the scheduler sees the first stage only.
    assert hidden_state_group(groups(attention)) == 0
    for wrong in (groups(attention, attention), groups(ours, ours), groups()):
        with pytest.raises(ValueError, match=r"kv_cache_groups: . of . groups"):
            hidden_state_group(wrong)


# ---- connector, worker half ----


@pytest.fixture
def worker(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> EhsConnector:
    monkeypatch.setattr(connector_module, "get_tensor_model_parallel_rank", lambda: 0)
    worker = EhsConnector(engine.config, KVConnectorRole.WORKER, engine.kv_cache_config())
    worker.register_kv_caches({"model.layers.0.attn": torch.zeros(1), engine.name: engine.cache})
    return worker


def run_prompt(engine: Engine, prompt_length: int, block_ids: list[int]) -> torch.Tensor:
    """One step over a whole prompt; returns what its record must hold."""
    layer_2, layer_5 = states(2, prompt_length)
    slots = [block_ids[i // BLOCK_SIZE] * BLOCK_SIZE + i % BLOCK_SIZE for i in range(prompt_length)]
    engine.propose([layer_2, layer_5], slots)
    return torch.stack([layer_5, layer_2, layer_5], dim=1)


def test_states_pass_from_the_model_to_a_whole_file_and_the_request_is_reported_once(
    engine: Engine, scheduler: EhsConnector, worker: EhsConnector
) -> None:
    wanted = run_prompt(engine, 40, [3, 1])
    _, params = scheduler.request_finished_all_groups(finished(), ([9, 9], [3, 1]))
    worker.bind_connector_metadata(scheduler.build_connector_meta(None))
    assert worker.get_finished(set()) == ({"7-abc"}, None)
    # The blocks may be given away and written anew from here on.
    engine.cache.fill_(0)
    worker.clear_connector_metadata()
    worker.bind_connector_metadata(scheduler.build_connector_meta(None))
    assert worker.get_finished(set()) == (None, None)
    worker.shutdown()
    record = read_hidden_states((params or {})["hidden_states_path"], timeout=0)
    assert torch.equal(record.hidden_states, wanted)
    assert record.token_ids.tolist() == list(range(10, 50))
    assert record.layer_ids == (5, 2, 5)


def test_a_record_says_where_it_comes_from(
    engine: Engine, scheduler: EhsConnector, worker: EhsConnector, predictable: Path
) -> None:
    run_prompt(engine, 40, [3, 1])
    scheduler.request_finished(finished("hostile/id"), [3, 1])
    (save,) = saves(scheduler)
    worker.save(save)
    worker.shutdown()
    with safetensors.safe_open(save.path, framework="pt") as file:
        metadata = file.metadata()
    assert set(metadata) == set(METADATA_KEYS)
    assert (
        metadata
        | {
            "layer_ids": "[5, 2, 5]",
            "model": str(predictable),
            "revision": "",
            "dtype": "float32",
            "engine": " ".join(compat.check_vllm()),
            "runner": "v2",
            "speculator": "ehs.engine.speculator.ExtractHiddenStatesSpeculator",
            "request_id": "hostile/id",
            "num_prompt_tokens": "40",
            "positions": "all",
        }
        == metadata
    )


def test_in_one_process_the_record_is_read_before_the_blocks_are_given_away(
    engine: Engine, scheduler: EhsConnector, worker: EhsConnector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connector_module, "has_kv_transfer_group", lambda: True)
    monkeypatch.setattr(connector_module, "get_kv_transfer_group", lambda: worker)
    wanted = run_prompt(engine, 40, [3, 1])
    keep, params = scheduler.request_finished(finished(), [3, 1])
    engine.cache.fill_(0)
    assert not keep
    assert saves(scheduler) == []
    record = read_hidden_states((params or {})["hidden_states_path"], timeout=20)
    worker.shutdown()
    assert torch.equal(record.hidden_states, wanted)


@pytest.mark.parametrize("case", ["another rank", "another stage"])
def test_only_the_rank_that_has_the_states_writes(
    engine: Engine, scheduler: EhsConnector, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, case: str
) -> None:
    monkeypatch.setattr(connector_module, "get_tensor_model_parallel_rank", lambda: int(case == "another rank"))
    worker = EhsConnector(engine.config, KVConnectorRole.WORKER, engine.kv_cache_config())
    worker.register_kv_caches(
        {"model.layers.0.attn": torch.zeros(1)} if case == "another stage" else {engine.name: engine.cache}
    )
    scheduler.request_finished(finished(), [3, 1])
    worker.bind_connector_metadata(scheduler.build_connector_meta(None))
    assert worker.get_finished(set()) == (None, None)
    worker.shutdown()
    assert list(tmp_path.glob("records/*")) == []
    assert worker.get_finished_count() == 1


def test_a_record_that_cannot_be_written_does_not_stop_the_ones_after_it(
    engine: Engine, scheduler: EhsConnector, worker: EhsConnector, tmp_path: Path
) -> None:
    wanted = run_prompt(engine, 40, [3, 1])
    (tmp_path / "file").touch()
    scheduler.request_finished(finished("good"), [3, 1])
    (good,) = saves(scheduler)
    bad = replace(good, request_id="bad", path=str(tmp_path / "file" / "bad.safetensors"))
    worker.bind_connector_metadata(connector_module.EhsConnectorMetadata([bad, good]))
    assert worker.get_finished(set()) == ({"bad", "good"}, None)
    worker.shutdown()
    assert torch.equal(read_hidden_states(good.path, timeout=0).hidden_states, wanted)


def test_a_storage_folder_that_broke_does_not_stop_the_engine(scheduler: EhsConnector, tmp_path: Path) -> None:
    (tmp_path / "records").write_text("a file where the folder was")
    scheduler.request_finished(finished(), [3, 1])


def test_an_older_record_that_cannot_be_removed_is_not_handed_out(
    scheduler: EhsConnector, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = finished()
    (tmp_path / "records").mkdir(exist_ok=True)
    (tmp_path / "records" / file_name(request.request_id)).touch()

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError("read-only file system")

    monkeypatch.setattr(Path, "unlink", refuse)
    assert scheduler.request_finished(request, [3, 1]) == (False, None)


def test_blocks_are_laid_out_token_by_token_as_in_the_file(engine: Engine) -> None:
    assert EhsConnector.get_required_kvcache_layout(engine.config) == "LBNHC"


# ---- faults do what they say ----


def test_the_fault_of_swapped_rows_swaps_the_first_two_rows_of_a_step(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draft_model, "write_hidden_states", write_hidden_states)
    FAULTS["swap-token-rows"].inject()
    layers = states(2, 3)
    engine.propose(layers, [40, 41, 42])
    rows = engine.cache[1, 1, 8:11]
    assert torch.equal(rows, layers[0][[1, 0, 2]])
    engine.propose([layer[:1] for layer in layers], [64])
    assert torch.equal(engine.cache[2, 1, 0], layers[0][0])


def test_the_fault_of_swapped_requests_reads_the_blocks_of_the_one_before(
    scheduler: EhsConnector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(EhsConnector, "request_finished", EhsConnector.request_finished)
    FAULTS["swap-requests"].inject()
    for request_id, block_ids in (("a", [3, 1]), ("b", [2, 4]), ("c", [5])):
        scheduler.request_finished(finished(request_id, prompt=(1, 2)), block_ids)
    assert [save.block_ids for save in saves(scheduler)] == [(3, 1), (3, 1), (2, 4)]


def test_the_fault_of_shifted_layers_captures_one_too_early_and_says_nothing_of_it(
    config_for: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draft_config, "LayerSelection", LayerSelection)
    FAULTS["shift-layer-ids"].inject()
    draft = draft_of(config_for([5, -1, 0]))
    assert draft.eagle_aux_hidden_state_layer_ids == [0, 4, 5]
    assert draft.selection.layer_ids == (5, 6, 0)
    assert draft.selection.sources == (1, 2, 0)


# ---- what a session notes down ----


def test_each_sample_of_a_request_has_its_own_record(tmp_path: Path) -> None:
    params = {"hidden_states_path": str(tmp_path / "0_31-ab12.safetensors")}
    paths = [session._sample_path(params, sample, 3) for sample in range(3)]
    assert paths == [str(tmp_path / f"{sample}_31-ab12.safetensors") for sample in range(3)]
    assert session._sample_path({"hidden_states_path": "/x/12.safetensors"}, 0, 1) == "/x/12.safetensors"
    assert session._sample_path(None, 0, 1) is None


def test_steps_are_noted_as_scheduled_and_the_scheduler_is_left_as_it_was() -> None:
    def output(total: int, preempted: set[str] | None) -> Any:
        return SimpleNamespace(
            total_num_scheduled_tokens=total,
            scheduled_spec_decode_tokens={"a": [-1, -1]} if total else {},
            num_scheduled_tokens={"a": total},
            preempted_req_ids=preempted,
        )

    outputs = [output(5, None), output(0, None), output(3, {"b", "c"})]
    schedule = iter(outputs).__next__
    scheduler = SimpleNamespace(schedule=schedule)
    with session._recorded_steps(scheduler) as steps:
        assert [scheduler.schedule() for _ in outputs] == outputs
    assert scheduler.schedule == schedule
    # A step that schedules nothing is none.
    assert [(step.num_scheduled_tokens, step.num_draft_tokens, step.num_preempted) for step in steps] == [
        ({"a": 5}, 2, 0),
        ({"a": 3}, 2, 2),
    ]


def test_an_error_of_an_engine_is_one_line() -> None:
    assert session._one_line(ValueError("first\n  second")) == "ValueError: first second"
