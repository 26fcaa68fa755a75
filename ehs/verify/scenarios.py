# SPDX-License-Identifier: Apache-2.0
# A scenario is one way the engine may schedule prompts: requests in rounds, and the proof that it happened.
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ehs.engine.plan import RequestSpec, Round, RoundTrace
from ehs.verify.prompts import Prompts

# Tokens a block; the CPU attention backend takes multiples of 32.
BLOCK_SIZE = 32
ROOMY_TOKENS = 2048
CHUNK_TOKENS = 128
TIGHT_BLOCKS = 32
LONG_PROMPT = TIGHT_BLOCKS * BLOCK_SIZE - 8


class DidNotHappenError(AssertionError):
    """A scenario ran but its situation did not come about; its values prove nothing."""


@dataclass(frozen=True)
class EngineSettings:
    """Engine arguments shared by the scenarios that run in one engine, and the layers it extracts.

    Attributes:
        name: key of ENGINES.
        arguments: for `vllm.LLM`.
        layers: layer ids for a model of N layers.
        own_layers: the ids are the point of its scenarios: `--layers` does not replace them.
    """

    name: str
    arguments: dict[str, Any]
    layers: Callable[[int], Sequence[int]]
    own_layers: bool = True


def usual_layers(num_hidden_layers: int) -> tuple[int, ...]:
    """First, middle and the last two ids."""
    return tuple(sorted({0, num_hidden_layers // 2, num_hidden_layers - 1, num_hidden_layers}))


_COMMON = {"block_size": BLOCK_SIZE, "max_num_seqs": 8, "enforce_eager": True, "seed": 0, "gpu_memory_utilization": 0.5}
_ROOMY = _COMMON | {"max_model_len": 512, "max_num_batched_tokens": ROOMY_TOKENS, "enable_prefix_caching": True}
_TIGHT = _COMMON | {
    "max_model_len": TIGHT_BLOCKS * BLOCK_SIZE,
    "max_num_batched_tokens": CHUNK_TOKENS,
    "enable_prefix_caching": False,
    # One more than the requests may use: block 0 is the null block.
    "num_gpu_blocks_override": TIGHT_BLOCKS + 1,
}

ENGINES = {
    settings.name: settings
    for settings in (
        EngineSettings("roomy", _ROOMY, usual_layers, own_layers=False),
        EngineSettings("tight", _TIGHT, usual_layers, own_layers=False),
        EngineSettings("first-and-last", _ROOMY, lambda _: (0, -1)),
        EngineSettings("every-layer", _ROOMY, lambda num_hidden_layers: range(num_hidden_layers + 1)),
        EngineSettings("any-order", _ROOMY, lambda _: (-2, 0, -1, -2)),
    )
}


@dataclass(frozen=True)
class Scenario:
    """One way to schedule.

    Attributes:
        name: as on the command line.
        summary: one line for people.
        engine: key of ENGINES.
        rounds: requests per round, from a source of prompts.
        evidence: says in words that the situation came about, or raises DidNotHappenError.
    """

    name: str
    summary: str
    engine: str
    rounds: Callable[[Prompts], Sequence[Sequence[RequestSpec]]]
    evidence: Callable[[Sequence[RoundTrace]], str]

    def plan(self, prompts: Prompts) -> list[Round]:
        """The rounds as an engine process takes them."""
        return [Round(scenario=self.name, requests=list(requests)) for requests in self.rounds(prompts)]


@dataclass
class _Registry:
    scenarios: dict[str, Scenario] = field(default_factory=dict)

    def add(
        self, name: str, summary: str, engine: str, evidence: Callable[[Sequence[RoundTrace]], str]
    ) -> Callable[[Callable[[Prompts], Sequence[Sequence[RequestSpec]]]], None]:
        def register(rounds: Callable[[Prompts], Sequence[Sequence[RequestSpec]]]) -> None:
            self.scenarios[name] = Scenario(name, summary, engine, rounds, evidence)

        return register


_registry = _Registry()
SCENARIOS = _registry.scenarios
scenario = _registry.add


def request(prompt_token_ids: list[int], max_tokens: int = 1, **options: Any) -> RequestSpec:
    """A greedy request that runs to `max_tokens`; `outputs=True` also records the generated tokens."""
    include_output_tokens = options.pop("outputs", False)
    sampling = {"temperature": 0.0, "max_tokens": max_tokens, "ignore_eos": True, **options}
    return RequestSpec(
        prompt_token_ids=prompt_token_ids, sampling=sampling, include_output_tokens=include_output_tokens
    )


# ---- evidence ----


def _scheduled_tokens(traces: Sequence[RoundTrace]) -> list[dict[str, int]]:
    return [step.num_scheduled_tokens for trace in traces for step in trace.steps]


def _most_requests_in_a_step(traces: Sequence[RoundTrace]) -> int:
    return max((len(step) for step in _scheduled_tokens(traces)), default=0)


def batched(traces: Sequence[RoundTrace]) -> str:
    """Several requests shared a step."""
    most = _most_requests_in_a_step(traces)
    if most < 2:  # noqa: PLR2004 - a batch is two or more
        raise DidNotHappenError("no step held more than one request")
    return f"up to {most} requests in a step"


def reused(traces: Sequence[RoundTrace]) -> str:
    """The engine was called several times."""
    if len(traces) < 2 or not all(trace.steps for trace in traces):  # noqa: PLR2004
        raise DidNotHappenError(f"{len(traces)} calls of the engine")
    return f"{len(traces)} calls of one engine"


def chunked(traces: Sequence[RoundTrace]) -> str:
    """A prompt was split over steps."""
    steps = _scheduled_tokens(traces)
    chunks: dict[str, int] = {}
    for step in steps:
        for request_id, num_tokens in step.items():
            # A decode step has one token, with a draft to verify two.
            chunks[request_id] = chunks.get(request_id, 0) + (num_tokens > 2)  # noqa: PLR2004
    most = max(chunks.values(), default=0)
    if most < 2:  # noqa: PLR2004
        raise DidNotHappenError("every prompt went through in one step")
    return f"a prompt in {most} chunks"


def prefix_hit(traces: Sequence[RoundTrace]) -> str:
    """Prompt tokens came from the prefix cache."""
    cached = [outcome.num_cached_tokens for outcome in traces[-1].outcomes]
    if not cached or not all(cached):
        raise DidNotHappenError(f"cached prompt tokens per request: {cached}")
    return f"{', '.join(map(str, cached))} cached prompt tokens"


def preempted(traces: Sequence[RoundTrace]) -> str:
    """Requests lost their blocks and started again."""
    count = sum(step.num_preempted for trace in traces for step in trace.steps)
    if not count:
        raise DidNotHappenError("no request was preempted")
    return f"requests preempted: {count}"


def several_samples(traces: Sequence[RoundTrace]) -> str:
    """Requests gave several samples that differ."""
    per_request: dict[int, set[tuple[int, ...]]] = {}
    for outcome in traces[-1].outcomes:
        per_request.setdefault(outcome.request, set()).add(tuple(outcome.output_token_ids))
    fewest = min((len(samples) for samples in per_request.values()), default=0)
    if fewest < 2:  # noqa: PLR2004
        raise DidNotHappenError("all samples of a request were equal")
    return f"at least {fewest} different samples a request"


def decoded(traces: Sequence[RoundTrace]) -> str:
    """Tokens were generated over several steps."""
    fewest = min((len(outcome.output_token_ids) for trace in traces for outcome in trace.outcomes), default=0)
    if fewest < 2:  # noqa: PLR2004
        raise DidNotHappenError(f"{fewest} generated tokens")
    drafts = sum(step.num_draft_tokens for trace in traces for step in trace.steps)
    return f"{fewest} tokens generated, {drafts} drafts verified"


# ---- scenarios ----


@scenario("plain", "a batch of prompts of different lengths", "roomy", batched)
def _(prompts: Prompts) -> Sequence[Sequence[RequestSpec]]:
    return [[request(prompts(index, length)) for index, length in enumerate((5, 23, 48, 91))]]


@scenario("repeated-use", "three calls of one engine, the last with the prompts of the first", "roomy", reused)
def _(prompts: Prompts) -> Sequence[Sequence[RequestSpec]]:
    first = [request(prompts(10 + index, 30 + index)) for index in range(3)]
    second = [request(prompts(20 + index, 41 + index)) for index in range(3)]
    return [first, second, first]


@scenario("prefix-hit", "prompts whose first blocks are in the prefix cache, block-aligned", "roomy", prefix_hit)
def _(prompts: Prompts) -> Sequence[Sequence[RequestSpec]]:
    common = prompts(30, 4 * BLOCK_SIZE)
    again = [common[: 3 * BLOCK_SIZE] + prompts(31, 2 * BLOCK_SIZE), common]
    return [[request(common)], [request(tokens) for tokens in again]]


@scenario("prefix-hit-unaligned", "prompts that leave the cached prefix in mid-block", "roomy", prefix_hit)
def _(prompts: Prompts) -> Sequence[Sequence[RequestSpec]]:
    common = prompts(40, 3 * BLOCK_SIZE + 5)
    again = [common + prompts(41, 9), common[: 2 * BLOCK_SIZE + 3] + prompts(42, 20)]
    return [[request(common)], [request(tokens) for tokens in again]]


@scenario("several-samples", "n=3 samples of each prompt at temperature 1", "roomy", several_samples)
def _(prompts: Prompts) -> Sequence[Sequence[RequestSpec]]:
    options: dict[str, Any] = {"n": 3, "temperature": 1.0, "outputs": True}
    return [[request(prompts(50 + index, 19 + index), 3, seed=50 + index, **options) for index in range(2)]]


@scenario("sampling", "generated tokens recorded, temperature 1", "roomy", decoded)
def _(prompts: Prompts) -> Sequence[Sequence[RequestSpec]]:
    return [[request(prompts(60 + i, 25 + i), 4, temperature=1.0, seed=60 + i, outputs=True) for i in range(2)]]


@scenario("generated-tokens", "generated tokens recorded, greedy, over a block boundary", "roomy", decoded)
def _(prompts: Prompts) -> Sequence[Sequence[RequestSpec]]:
    return [[request(prompts(70 + i, BLOCK_SIZE - 3 + i), 6, outputs=True) for i in range(3)]]


@scenario("chunked-prefill", "prompts longer than the token budget of a step", "tight", chunked)
def _(prompts: Prompts) -> Sequence[Sequence[RequestSpec]]:
    return [[request(prompts(80 + index, length), 2, outputs=True) for index, length in enumerate((200, 33, 170))]]


@scenario("long-prompt", f"one prompt of {LONG_PROMPT} tokens, nearly the whole cache", "tight", chunked)
def _(prompts: Prompts) -> Sequence[Sequence[RequestSpec]]:
    return [[request(prompts(90, LONG_PROMPT))]]


@scenario("preemption", "the cache runs out in mid-decode; requests lose their blocks and resume", "tight", preempted)
def _(prompts: Prompts) -> Sequence[Sequence[RequestSpec]]:
    # All five prompts fit, with two blocks to spare; each request soon needs one more.
    length = 6 * BLOCK_SIZE - 3
    return [[request(prompts(100 + index, length), 12, outputs=True) for index in range(5)]]


@scenario("first-and-last", "layer ids 0 and N only, N given as -1", "first-and-last", batched)
def _(prompts: Prompts) -> Sequence[Sequence[RequestSpec]]:
    return [[request(prompts(110 + index, 20 + 13 * index), 2, outputs=True) for index in range(3)]]


@scenario("every-layer", "all layer ids 0..N", "every-layer", batched)
def _(prompts: Prompts) -> Sequence[Sequence[RequestSpec]]:
    return [[request(prompts(120 + index, 20 + 13 * index), 2, outputs=True) for index in range(3)]]


@scenario("any-order", "layer ids out of order and twice: -2, 0, -1, -2", "any-order", batched)
def _(prompts: Prompts) -> Sequence[Sequence[RequestSpec]]:
    return [[request(prompts(130 + index, 20 + 13 * index), 2, outputs=True) for index in range(3)]]
