# SPDX-License-Identifier: Apache-2.0
# What each fault does to the engine is tested in test_engine_parts.py: that needs vLLM.
import re
from types import SimpleNamespace

import pytest

from ehs.verify import faults
from ehs.verify.faults import FAULTS


def test_every_fault_points_to_a_public_bug_of_its_own() -> None:
    references = [fault.reference for fault in FAULTS.values()]
    assert all(re.fullmatch(r"https://github\.com/[\w.-]+/[\w.-]+/(issues|pull)/\d+", url) for url in references)
    assert len(set(references)) == len(FAULTS) >= 3


def test_faults_are_found_by_their_own_name_and_described_in_one_line() -> None:
    for name, fault in FAULTS.items():
        assert fault.name == name
        assert re.fullmatch(r"[a-z]+(-[a-z]+)+", name)
        assert "\n" not in fault.summary
        assert fault.site
    assert len({fault.summary for fault in FAULTS.values()}) == len({fault.inject for fault in FAULTS.values()})


def test_every_way_a_copy_goes_wrong_has_a_fault() -> None:
    # Wrong row, wrong request, wrong layer.
    assert {"swap-token-rows", "swap-requests", "shift-layer-ids"} <= set(FAULTS)


def test_a_fault_that_misses_its_place_is_an_error_and_changes_nothing() -> None:
    owner = SimpleNamespace(there=1)
    with pytest.raises(AssertionError):
        faults._patch(owner, "not_there", 2)
    faults._patch(owner, "there", 2)
    assert vars(owner) == {"there": 2}
