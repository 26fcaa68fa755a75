# SPDX-License-Identifier: Apache-2.0
# What goes into an engine process and what comes out of it. Imports no vLLM: the harness speaks this.
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from ehs.config import ExtractionConfig
from ehs.cpu_backend.environment import Device


class _Message(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class RequestSpec(_Message):
    """One request.

    Attributes:
        prompt_token_ids: the prompt.
        sampling: keyword arguments for `vllm.SamplingParams`.
        include_output_tokens: also record the generated tokens that went through the model.
    """

    prompt_token_ids: list[int]
    sampling: dict[str, Any]
    include_output_tokens: bool = False


class Round(_Message):
    """Requests handed to the engine together; `scenario` says on whose behalf."""

    scenario: str
    requests: list[RequestSpec]


class SessionPlan(_Message):
    """One engine and everything it is asked to do."""

    model: str
    dtype: str
    config: ExtractionConfig
    engine: dict[str, Any]
    rounds: list[Round]
    device: Device
    runner: Literal["v1", "v2"] = "v2"
    fault: str | None = None


class Outcome(_Message):
    """One sample of one request.

    Attributes:
        request: index in its round.
        sample: index among the request's samples.
        output_token_ids: generated tokens.
        path: where its record is.
        num_cached_tokens: prompt tokens found in the prefix cache.
    """

    request: int
    sample: int
    output_token_ids: list[int]
    path: str | None
    num_cached_tokens: int


class Step(_Message):
    """One decision of the scheduler: tokens per request, drafts planned, requests preempted."""

    num_scheduled_tokens: dict[str, int]
    num_draft_tokens: int
    num_preempted: int


class RoundTrace(_Message):
    """What happened in one round."""

    scenario: str
    outcomes: list[Outcome]
    steps: list[Step]


class Subject(_Message):
    """The classes that really ran, and where."""

    vllm: str
    runner: str
    runner_class: str
    speculator_class: str
    connector_class: str
    attention_backend: str


class SessionResult(_Message):
    """What an engine process answers: `error` names what broke it, `stage` when."""

    subject: Subject | None
    rounds: list[RoundTrace]
    stage: Literal["start", "run", "done"]
    error: str | None = None
    start_seconds: float = 0.0
