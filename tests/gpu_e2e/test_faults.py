# SPDX-License-Identifier: Apache-2.0
from pathlib import Path

import pytest

from ehs.verify.faults import FAULTS
from ehs.verify.run import Options, Verification

# What the verdict must say about the first wrong row of the scenario "plain".
PLACES = {
    "swap-token-rows": "request 0, token 0 (id 5), layer id 0: channel 4 is 22, expected 5; "
    "the row says it is layer id 0, position 1, token id 22 of request 0 (2 of 5 tokens wrong",
    "swap-requests": "request 1, token 0 (id 216), layer id 0: channel 4 is 5, expected 216; "
    "the row says it is layer id 0, position 0, token id 5 of request 0 (23 of 23 tokens wrong",
    "shift-layer-ids": "request 0, token 0 (id 5), layer id 3: channel 0 is 2, expected 3; "
    "the row says it is layer id 2, position 0, token id 5 of request 0 (5 of 5 tokens wrong, layer ids [3, 5, 6])",
}


# That a fault also ends the command with exit status 1 is shown by the README's command.
@pytest.mark.timeout(300)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_caught_and_placed(tmp_path: Path, fault: str) -> None:
    options = Options(dtypes=("float32",), scenarios=("plain",), fault=fault, output=tmp_path)
    report = Verification(options).run()
    assert not report.passed
    assert report.fault == fault
    (result,) = report.results
    assert result.status == "FAIL"
    assert any(problem.startswith(PLACES[fault]) for problem in result.problems), result.problems
