# SPDX-License-Identifier: Apache-2.0
# Judges records. Cheap facts first (is it there, whose tokens, which layers, which dtype), numbers last.
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch

from ehs.engine.plan import Outcome, RequestSpec
from ehs.models import code
from ehs.store import HiddenStates, HiddenStatesError, read_hidden_states
from ehs.verify.limits import Limit
from ehs.verify.metrics import Comparison, compare
from ehs.verify.reference import Baseline
from ehs.verify.report import LayerError, Place


class States(Protocol):
    """A source of reference states."""

    def states(self, token_ids: Sequence[int]) -> torch.Tensor:
        """`[num_tokens, N + 1, hidden_size]`, fp32."""
        ...


@dataclass(frozen=True)
class Expectation:
    """What a record of a request must be."""

    request_name: str
    spec: RequestSpec
    outcome: Outcome
    layer_ids: tuple[int, ...]
    dtype: str

    @property
    def token_ids(self) -> list[int]:
        """Prompt, and the generated tokens that went through the model when they were asked for."""
        outputs = self.outcome.output_token_ids[:-1] if self.spec.include_output_tokens else []
        return self.spec.prompt_token_ids + outputs


@dataclass
class Verdict:
    """What the records of one scenario showed, so far.

    Attributes:
        problems: reasons to fail, one line each, with their place.
        worst: place of the largest excess over the limit, failing or not.
        layer_errors: largest error per layer id.
        num_records: records read.
        num_values: values compared.
    """

    problems: list[str] = field(default_factory=list)
    worst: Place | None = None
    layer_errors: dict[int, LayerError] = field(default_factory=dict)
    num_records: int = 0
    num_values: int = 0


class Judge:
    """Compares records with a reference under one limit.

    Args:
        limit: rule and number.
        reference: truth in fp32.
        baseline: the reference model's own error in the engine's dtype, for the rule "baseline".
        predictable_vocab_size: set for the predictable model: its generated tokens are checked too, and a wrong row is
            asked what it says about itself.
    """

    def __init__(
        self,
        limit: Limit,
        reference: States,
        baseline: Baseline | None = None,
        predictable_vocab_size: int | None = None,
    ) -> None:
        self.limit = limit
        self.reference = reference
        self.baseline = baseline
        self.vocab_size = predictable_vocab_size

    def judge(self, expected: Expectation, verdict: Verdict, others: Sequence[Expectation] = ()) -> None:
        """Judge one record and add what is found to `verdict`; a wrong row is looked up among `others`."""
        record = self._read(expected, verdict)
        if record is None:
            return
        reference = self.reference.states(expected.token_ids)[:, list(record.layer_ids)]
        if reference.shape != record.hidden_states.shape:
            shapes = f"{list(record.hidden_states.shape)}, expected {list(reference.shape)}"
            verdict.problems.append(f"{expected.request_name}: shape {shapes}")
            return
        comparison = self._compare(record, reference, expected.token_ids)
        verdict.num_records += 1
        verdict.num_values += record.hidden_states.numel()
        self._note_layers(comparison, record, verdict)
        place = self._worst_place(comparison, record, reference, expected, others)
        if verdict.worst is None or place.excess > verdict.worst.excess:
            verdict.worst = place
        if place.excess > 1:
            failing = comparison.excess > 1
            rows, layers = int(failing.any(dim=1).sum()), failing.any(dim=0).nonzero().flatten().tolist()
            ids = sorted({record.layer_ids[column] for column in layers})
            verdict.problems.append(f"{place.in_words()} ({rows} of {len(failing)} tokens wrong, layer ids {ids})")

    def _compare(self, record: HiddenStates, reference: torch.Tensor, token_ids: Sequence[int]) -> Comparison:
        if self.baseline is None:
            return compare(record.hidden_states, reference, self.limit)
        comparisons = (
            compare(record.hidden_states, reference, self.limit, own_error[:, list(record.layer_ids)])
            for own_error in self.baseline.own_errors(token_ids)
        )
        for comparison in comparisons:
            if comparison.excess.max() <= 1:
                break
        return comparison

    def _read(self, expected: Expectation, verdict: Verdict) -> HiddenStates | None:
        """The record when everything but its values is right."""
        name = expected.request_name
        if expected.outcome.path is None:
            verdict.problems.append(f"{name}: the output names no record")
            return None
        try:
            record = read_hidden_states(Path(expected.outcome.path), timeout=10)
        except (HiddenStatesError, TimeoutError) as error:
            verdict.problems.append(f"{name}: {error}")
            return None
        token_ids = record.token_ids.tolist()
        facts = (
            ("token ids", token_ids, expected.token_ids),
            ("layer ids", list(record.layer_ids), list(expected.layer_ids)),
            ("dtype", record.metadata["dtype"], expected.dtype),
        )
        for what, got, wanted in facts:
            if got != wanted:
                verdict.problems.append(f"{name}: {what} {_difference(got, wanted)}")
                return None
        if self.vocab_size is not None:
            self._check_generated(expected, verdict)
        return record

    def _check_generated(self, expected: Expectation, verdict: Verdict) -> None:
        """The predictable model's next token is a known function of the last."""
        assert self.vocab_size is not None
        chain = torch.tensor([expected.spec.prompt_token_ids[-1], *expected.outcome.output_token_ids])
        allowed = code.successors(chain[:-1], self.vocab_size)
        if expected.spec.sampling["temperature"] == 0:
            allowed = allowed[:, :1]
        wrong = (allowed != chain[1:, None]).all(dim=1).nonzero().flatten()
        if len(wrong):
            index = int(wrong[0])
            verdict.problems.append(
                f"{expected.request_name}: generated token {index} is {int(chain[index + 1])}, token "
                f"{int(chain[index])} is followed by {allowed[index].tolist()}"
            )

    def _note_layers(self, comparison: Comparison, record: HiddenStates, verdict: Verdict) -> None:
        for column, layer_id in enumerate(record.layer_ids):
            noted = verdict.layer_errors.get(layer_id) or LayerError(layer_id=layer_id, error=0, excess=0)
            verdict.layer_errors[layer_id] = LayerError(
                layer_id=layer_id,
                error=max(noted.error, float(comparison.relative[:, column].max())),
                excess=max(noted.excess, float(comparison.excess[:, column].max())),
            )

    def _worst_place(
        self,
        comparison: Comparison,
        record: HiddenStates,
        reference: torch.Tensor,
        expected: Expectation,
        others: Sequence[Expectation],
    ) -> Place:
        token, column = comparison.worst()
        channel = int(comparison.channel[token, column])
        row = record.hidden_states[token, column]
        says = code.decode(row) if self.vocab_size is not None else None
        return Place(
            request=expected.request_name,
            token=token,
            token_id=int(record.token_ids[token]),
            layer_id=record.layer_ids[column],
            column=column,
            channel=channel,
            got=float(row[channel]),
            expected=float(reference[token, column, channel]),
            error=float(comparison.relative[token, column]),
            excess=float(comparison.excess[token, column]),
            row_says=_in_words(says, expected, others) if says else None,
        )


def _in_words(says: code.Place, expected: Expectation, others: Sequence[Expectation]) -> str:
    words = f"layer id {says.layer_id}, position {says.position}, token id {says.token_id}"
    for owner in (expected, *others):
        if says.position < len(owner.token_ids) and owner.token_ids[says.position] == says.token_id:
            return f"{words} of {owner.request_name}"
    return words


def _difference(got: object, wanted: object) -> str:
    if isinstance(got, list) and isinstance(wanted, list):
        if len(got) != len(wanted):
            return f"are {len(got)}, expected {len(wanted)}"
        index = next(i for i, pair in enumerate(zip(got, wanted, strict=True)) if pair[0] != pair[1])
        return f"differ first at index {index}: {got[index]}, expected {wanted[index]}"
    return f"{got}, expected {wanted}"
