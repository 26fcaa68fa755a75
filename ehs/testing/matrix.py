# SPDX-License-Identifier: Apache-2.0
from pathlib import Path

from ehs.verify.report import ScenarioResult, VerifyReport
from ehs.verify.run import Options, Verification
from ehs.verify.scenarios import ENGINES, SCENARIOS

Cell = tuple[str, str, str]


class Matrix:
    """Results of scenarios x models for a test suite, filled engine by engine as tests ask for them.

    Engines are expensive: each runs once, for all wanted cells that share it.

    Args:
        wanted: cells (model, dtype, scenario) that some selected test will ask for.
        output: folder for engine logs.
    """

    def __init__(self, wanted: set[Cell], output: Path) -> None:
        self.wanted = wanted
        self.output = output
        self.report: VerifyReport | None = None
        self._results: dict[Cell, ScenarioResult] = {}
        self._verifications: dict[str, Verification] = {}

    def result(self, model: str, dtype: str, scenario: str) -> ScenarioResult:
        """Result of one cell; runs its engine when no cell of that engine was asked for before."""
        cell = (model, dtype, scenario)
        if cell not in self._results:
            self._run(model, dtype, SCENARIOS[scenario].engine)
        return self._results[cell]

    def _run(self, model: str, dtype: str, engine: str) -> None:
        if model not in self._verifications:
            self._verifications[model] = Verification(Options(model=model, output=self.output))
        verification = self._verifications[model]
        report = self.report = self.report or verification.report()
        cells = [scenario for scenario in SCENARIOS.values() if (model, dtype, scenario.name) in self.wanted]
        here = [scenario for scenario in cells if scenario.engine == engine]
        results, run = verification.run_engine(dtype, ENGINES[engine], here)
        report.results += results
        report.engines.append(run)
        report.seconds += run.total_seconds
        self._results |= {(result.model, result.dtype, result.scenario): result for result in results}
