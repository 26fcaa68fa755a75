# SPDX-License-Identifier: Apache-2.0
# Runs inside the engine process; imported ahead of time by the fork server (see launch.py).
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import vllm
from vllm.v1.core.sched.output import SchedulerOutput

from ehs import compat
from ehs.cpu_backend.environment import set_environment
from ehs.engine.plan import Outcome, Round, RoundTrace, SessionPlan, SessionResult, Step, Subject


def run_session(plan: SessionPlan) -> SessionResult:
    """Start one in-process engine, run every round, and report; an exception becomes the result's `error`."""
    world_size = plan.engine.get("tensor_parallel_size", 1) * plan.engine.get("pipeline_parallel_size", 1)
    set_environment(plan.device, runner=plan.runner, world_size=world_size)
    if plan.fault:
        from ehs.verify.faults import FAULTS

        FAULTS[plan.fault].inject()
    start = time.monotonic()
    try:
        llm = vllm.LLM(plan.model, dtype=plan.dtype, **plan.config.engine_args(), **plan.engine)
    except Exception as error:  # noqa: BLE001 - whatever it is, the harness reports it
        return SessionResult(subject=None, rounds=[], stage="start", error=_one_line(error))
    start_seconds = time.monotonic() - start
    subject = find_subject(llm)
    rounds: list[RoundTrace] = []
    try:
        for planned in plan.rounds:
            rounds.append(_run_round(llm, planned))  # noqa: PERF401 - rounds that ended are kept when one breaks
        llm.llm_engine.engine_core.shutdown()
    except Exception as error:  # noqa: BLE001
        return SessionResult(
            subject=subject, rounds=rounds, stage="run", error=_one_line(error), start_seconds=start_seconds
        )
    return SessionResult(subject=subject, rounds=rounds, stage="done", start_seconds=start_seconds)


def find_subject(llm: vllm.LLM) -> Subject:
    """Read the classes off the live objects of an in-process engine."""
    core = llm.llm_engine.engine_core.engine_core
    executor = core.model_executor
    driver = getattr(executor, "driver_worker", None)
    if driver is None:
        # Workers are other processes; the last rank has a speculator whatever the parallelism.
        last_rank = llm.llm_engine.vllm_config.parallel_config.world_size - 1
        subject: Subject = executor.collective_rpc(_describe_worker, unique_reply_rank=last_rank)
        return subject
    return _describe_worker(driver)


def _describe_worker(worker: Any) -> Subject:
    model_runner = worker.model_runner if hasattr(worker, "model_runner") else worker.worker.model_runner
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    speculator = getattr(model_runner, "speculator", None) or getattr(model_runner, "drafter", None)
    groups = getattr(model_runner, "attn_groups", [])
    backends = {group.backend.get_name() for per_cache in groups for group in per_cache}
    return Subject(
        vllm=" ".join(compat.check_vllm()),
        runner=compat.runner_version(model_runner),
        runner_class=_name(model_runner),
        speculator_class=_name(speculator),
        connector_class=_name(get_kv_transfer_group()),
        attention_backend=", ".join(sorted(backends - {"CACHE_ONLY_ATTN"})),
    )


def _name(thing: object) -> str:
    return f"{type(thing).__module__}.{type(thing).__qualname__}"


def _run_round(llm: vllm.LLM, planned: Round) -> RoundTrace:
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    prompts = [{"prompt_token_ids": request.prompt_token_ids} for request in planned.requests]
    parameters = [
        vllm.SamplingParams(
            **request.sampling,
            extra_args={"kv_transfer_params": {"include_output_tokens": request.include_output_tokens}},
        )
        for request in planned.requests
    ]
    with _recorded_steps(scheduler) as steps:
        outputs = llm.generate(prompts, parameters, use_tqdm=False)
    # Workers in other processes save with the step after the last one.
    while scheduler.has_requests():
        llm.llm_engine.step()
    outcomes = [
        Outcome(
            request=index,
            sample=sample.index,
            output_token_ids=list(sample.token_ids),
            path=_sample_path(output.kv_transfer_params, sample.index, len(output.outputs)),
            num_cached_tokens=output.num_cached_tokens or 0,
        )
        for index, output in enumerate(outputs)
        for sample in output.outputs
    ]
    return RoundTrace(scenario=planned.scenario, outcomes=outcomes, steps=steps)


def _sample_path(params: dict[str, Any] | None, sample: int, num_samples: int) -> str | None:
    """Path of one sample: vLLM returns one path a request; with n > 1 the samples are called `<index>_<request id>`."""
    if not params:
        return None
    path = Path(params["hidden_states_path"])
    return str(path if num_samples == 1 else path.with_name(re.sub(r"^\d+_", f"{sample}_", path.name)))


@contextmanager
def _recorded_steps(scheduler: Any) -> Iterator[list[Step]]:
    steps: list[Step] = []
    schedule = scheduler.schedule

    def recording(*args: Any, **kwargs: Any) -> SchedulerOutput:
        output = schedule(*args, **kwargs)
        if output.total_num_scheduled_tokens:
            # With asynchronous scheduling the tokens are placeholders, but their number is what is scheduled.
            drafts = sum(map(len, output.scheduled_spec_decode_tokens.values()))
            steps.append(
                Step(
                    num_scheduled_tokens=dict(output.num_scheduled_tokens),
                    num_draft_tokens=drafts,
                    num_preempted=len(output.preempted_req_ids or ()),
                )
            )
        return output

    scheduler.schedule = recording
    try:
        yield steps
    finally:
        scheduler.schedule = schedule


def _one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: " + " ".join(str(error).split())
