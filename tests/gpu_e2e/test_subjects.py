# SPDX-License-Identifier: Apache-2.0
from pathlib import Path

import pytest

from ehs.cpu_backend.environment import Runner
from ehs.verify.report import VerifyReport
from ehs.verify.run import Options, Verification

pytestmark = pytest.mark.timeout(300)


def verify(tmp_path: Path, *scenarios: str, **options: object) -> VerifyReport:
    settings = Options(dtypes=("float32",), scenarios=scenarios, output=tmp_path, **options)  # type: ignore[arg-type]
    return Verification(settings).run()


@pytest.mark.parametrize(
    ("runner", "runner_class", "speculator_class"),
    [
        ("v2", "GPUModelRunner", "vllm.v1.worker.gpu.spec_decode.extract_hidden_states.ExtractHiddenStatesSpeculator"),
        ("v1", "ModelRunner", "vllm.v1.spec_decode.extract_hidden_states.ExtractHiddenStatesProposer"),
    ],
)
def test_upstream_is_judged_by_the_same_harness(
    tmp_path: Path, runner: Runner, runner_class: str, speculator_class: str
) -> None:
    report = verify(tmp_path, "plain", "generated-tokens", speculator="upstream", runner=runner)
    assert report.passed, report.results
    (run,) = report.engines
    assert run.subject is not None
    assert run.subject.runner == runner
    assert run.subject.speculator_class == speculator_class
    assert runner_class.removeprefix("GPU") in run.subject.runner_class


def test_upstream_breaks_on_layer_ids_out_of_order(tmp_path: Path) -> None:
    report = verify(tmp_path, "any-order", speculator="upstream")
    assert not report.passed
    assert report.results[0].status == "ERROR"
    assert "auxiliary hidden states" in report.results[0].problems[0]


@pytest.mark.parametrize(
    "sizes", [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}], ids=["tensor-parallel", "pipeline-parallel"]
)
def test_two_workers_give_the_same_states(tmp_path: Path, sizes: dict[str, int], device: object) -> None:
    if getattr(device, "kind", "") == "cuda":
        import torch

        if torch.cuda.device_count() < 2:
            pytest.skip("one GPU only")
    report = verify(tmp_path, "plain", "generated-tokens", **sizes)
    assert report.passed, report.results
