# SPDX-License-Identifier: Apache-2.0
from pathlib import Path
from typing import Any

from ehs.testing.matrix import Cell, Matrix

CELLS: set[Cell] = {
    ("predictable", "float32", "plain"),
    ("predictable", "float32", "generated-tokens"),
    ("predictable", "float32", "any-order"),
    ("predictable", "float16", "plain"),
}


def test_an_engine_runs_once_for_all_wanted_cells_that_share_it(fake_engine: Any, tmp_path: Path) -> None:
    matrix = Matrix(CELLS, tmp_path)
    for cell in sorted(CELLS) * 2:
        result = matrix.result(*cell)
        assert (result.model, result.dtype, result.scenario) == cell
        assert result.status == "PASS"
    assert sorted((plan.dtype, [planned.scenario for planned in plan.rounds]) for plan in fake_engine.plans) == [
        ("float16", ["plain"]),
        ("float32", ["any-order"]),
        ("float32", ["plain", "generated-tokens"]),
    ]
    assert matrix.report is not None
    assert len(matrix.report.results) == 4
    assert len(matrix.report.engines) == 3


def test_nothing_runs_before_a_cell_is_asked_for(fake_engine: Any, tmp_path: Path) -> None:
    assert Matrix(CELLS, tmp_path).report is None
    assert fake_engine.plans == []


def test_a_failing_cell_leaves_its_neighbours_alone(fake_engine: Any, tmp_path: Path) -> None:
    fake_engine.damage = lambda states: states * (states.shape[0] < 60)
    matrix = Matrix(CELLS, tmp_path)
    assert matrix.result("predictable", "float32", "plain").status == "FAIL"
    assert matrix.result("predictable", "float32", "generated-tokens").status == "PASS"
