# SPDX-License-Identifier: Apache-2.0
from pathlib import Path
from typing import Any

import pytest

from ehs.config import ExtractionConfig


def test_unknown_keys_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="layer_ids"):
        ExtractionConfig(layers=(1,), storage_path=tmp_path, layer_ids=[2])  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("layers", []),
        ("layers", [1, True]),
        ("layers", "1,2"),
        ("speculator", "eagle3"),
        ("draft_policy", "all"),
        ("writer_threads", 0),
        ("writer_threads", 65),
    ],
)
def test_a_value_out_of_range_is_refused_by_the_name_of_its_setting(tmp_path: Path, setting: str, value: Any) -> None:
    arguments: dict[str, Any] = {"layers": [1], "storage_path": tmp_path, setting: value}
    with pytest.raises(ValueError, match=setting):
        ExtractionConfig(**arguments)


def test_a_config_cannot_be_changed_after_it_was_checked(tmp_path: Path) -> None:
    config = ExtractionConfig(layers=(1,), storage_path=tmp_path)
    with pytest.raises(ValueError, match="frozen"):
        config.layers = ()


def test_a_storage_path_below_a_file_is_refused_and_the_file_is_named(tmp_path: Path) -> None:
    file = tmp_path / "file"
    # Executable, so that permission bits alone do not give it away.
    file.touch(mode=0o777)
    with pytest.raises(ValueError, match="storage_path=") as error:
        ExtractionConfig(layers=(1,), storage_path=file / "deeper" / "records")
    assert f"{file} is not a folder" in str(error.value)


def test_a_missing_storage_path_is_accepted_and_made_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = ExtractionConfig(layers=(1,), storage_path=Path("new/records"))
    assert config.storage_path == tmp_path / "new" / "records"
    assert not (tmp_path / "new").exists()


def test_home_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert ExtractionConfig(layers=(1,), storage_path=Path("~/records")).storage_path == tmp_path / "records"


def speculative(**options: Any) -> dict[str, Any]:
    arguments: dict[str, Any] = ExtractionConfig(**options).engine_args()["speculative_config"]
    return arguments


def test_the_engine_gets_the_layers_in_the_order_asked_for_and_the_name_of_the_speculator(tmp_path: Path) -> None:
    config = speculative(layers=[5, -1, 0, 5], storage_path=tmp_path)
    assert config["method"] == "extract_hidden_states"
    assert config["draft_model_config"]["hf_config"] == {
        "eagle_aux_hidden_state_layer_ids": [5, -1, 0, 5],
        "ehs_speculator": "ehs",
    }


@pytest.mark.parametrize(
    ("speculator", "policy", "plans_drafts"),
    [
        ("ehs", None, False),
        ("ehs", "none", False),
        ("ehs", "repeat", True),
        ("upstream", None, True),
        ("upstream", "repeat", True),
        ("upstream", "none", False),
    ],
)
def test_no_drafts_are_planned_for_any_batch_unless_upstream_or_asked_for(
    tmp_path: Path, *, speculator: str, policy: str | None, plans_drafts: bool
) -> None:
    config = speculative(layers=[1], storage_path=tmp_path, speculator=speculator, draft_policy=policy)
    assert config["draft_model_config"]["hf_config"]["ehs_speculator"] == speculator
    # The method itself always allows one draft; the schedule says how many are planned.
    assert config["num_speculative_tokens"] == 1
    schedule = config.get("num_speculative_tokens_per_batch_size", [])
    assert bool(schedule) is not plans_drafts
    for first, last, drafts in schedule:
        assert (first, drafts) == (1, 0)
        assert last >= 65536


def test_the_connector_gets_the_folder_and_the_number_of_threads(tmp_path: Path) -> None:
    config = ExtractionConfig(layers=(1,), storage_path=tmp_path / "records", writer_threads=7)
    transfer = config.engine_args()["kv_transfer_config"]
    assert (transfer["kv_connector"], transfer["kv_connector_module_path"], transfer["kv_role"]) == (
        "EhsConnector",
        "ehs.engine.connector",
        "kv_producer",
    )
    assert transfer["kv_connector_extra_config"] == {
        "shared_storage_path": str(tmp_path / "records"),
        "writer_threads": 7,
    }


def test_two_configs_do_not_share_what_the_engine_may_change(tmp_path: Path) -> None:
    config = ExtractionConfig(layers=(1,), storage_path=tmp_path)
    config.engine_args()["speculative_config"]["draft_model_config"]["hf_config"].clear()
    assert config.engine_args()["speculative_config"]["draft_model_config"]["hf_config"]
