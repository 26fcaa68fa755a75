# SPDX-License-Identifier: Apache-2.0
# Starts engine processes. Imports no vLLM: the parent stays free of it and outlives whatever the engine does.
import multiprocessing
import os
import signal
import sys
import threading
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path

from ehs.engine.plan import SessionPlan, SessionResult

GRACE_S = 5.0


def run_engine(plan: SessionPlan, log_path: Path, *, timeout: float) -> SessionResult:
    """Run a plan in a process of its own and wait for the answer.

    The process is forked from a server that has imported vLLM already, leads its own process group, and is gone with
    all its children when this returns or raises, Ctrl-C included.

    The caller has called `set_environment(plan.device)`, before anything imported triton: the server inherits that.

    Args:
        plan: what to run.
        log_path: receives what the engine prints.
        timeout: seconds.

    Returns:
        The engine's answer; a crash or a timeout is an answer with `error` set.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["ehs.engine.session"])
    receiver, sender = context.Pipe()
    process = context.Process(target=_engine_main, args=(sender, plan, str(log_path)))
    process.start()
    sender.close()
    try:
        if not receiver.poll(timeout):
            return _failed(f"no answer within {timeout:.0f} s")
        answer: SessionResult = receiver.recv()
    except EOFError:
        process.join(timeout=5)
        return _failed(f"the engine process died (exit status {process.exitcode})")
    else:
        process.join(timeout=30)
        return answer
    finally:
        # First the polite way, in which vLLM gives back its shared memory; then the one that works.
        process.terminate()
        process.join(timeout=GRACE_S)
        if process.pid is not None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
        process.join()
        receiver.close()


def _failed(error: str) -> SessionResult:
    return SessionResult(subject=None, rounds=[], stage="run", error=error)


def _engine_main(connection: Connection, plan: SessionPlan, log_path: str) -> None:
    os.setpgid(0, 0)
    log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    threading.Thread(target=_die_with_parent, args=(connection,), daemon=True).start()
    # SIGINT is the parent's business: it ends this group.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    from ehs.engine.session import run_session

    connection.send(run_session(plan))
    sys.stdout.flush()


def _die_with_parent(connection: Connection) -> None:
    """The parent never sends; the pipe's end means that it is gone."""
    with suppress(EOFError, OSError):
        connection.recv()
    os.killpg(0, signal.SIGKILL)
