# SPDX-License-Identifier: Apache-2.0
import pytest

from ehs.testing.matrix import Cell, Matrix
from ehs.verify.run import REAL_MODEL_DTYPES, USUAL_DTYPES
from ehs.verify.scenarios import SCENARIOS

MODELS = {**USUAL_DTYPES, "smollm2": REAL_MODEL_DTYPES}
CELLS = [(model, dtype, scenario) for model, dtypes in MODELS.items() for dtype in dtypes for scenario in SCENARIOS]


# The first test of an engine waits for all of that engine's scenarios.
@pytest.mark.timeout(900)
@pytest.mark.parametrize("cell", CELLS, ids="-".join)
def test_every_number_is_right(matrix: Matrix, cell: Cell) -> None:
    result = matrix.result(*cell)
    assert result.problems == []
    assert result.status == "PASS"
    assert result.evidence
    assert result.num_records >= 1
    assert result.num_values > 0


@pytest.mark.timeout(900)
@pytest.mark.parametrize("cell", [CELLS[0]], ids=["first-cell"])
def test_the_report_names_what_ran(matrix: Matrix, cell: Cell) -> None:
    matrix.result(*cell)
    assert matrix.report is not None
    for run in matrix.report.engines:
        assert run.subject is not None
        assert run.subject.runner == "v2"
        assert run.subject.speculator_class == "ehs.engine.speculator.ExtractHiddenStatesSpeculator"
        assert run.subject.connector_class == "ehs.engine.connector.EhsConnector"
        assert run.error is None
