"""Run a function on several ranks: as threads of this process, or as real gloo processes.

The function is called as ``fn(rank, group, *args)`` with the default group's name and returns a
picklable value; an error on any rank is raised here with that rank's traceback.
"""

from __future__ import annotations

import faulthandler
import functools
import importlib
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

ROOT = Path(__file__).resolve().parents[2]
PRELOADED = [
    "graphpar.pipeline",
    "tests.zoo",
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch.export._trace",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.llama.modeling_llama",
]


class RankError(RuntimeError):
    """A rank failed; the message holds its traceback."""


def run_threads(
    world: int, fn: Callable[..., Any], *args: Any, timeout: float = 120.0
) -> list[Any]:
    """Run ``fn`` on ``world`` threads with torch's threaded process group; results by rank.

    The ranks share the process's random generators.
    """
    from torch.testing._internal.distributed import multi_threaded_pg as threaded

    store = c10d.HashStore()
    results: list[Any] = [None] * world
    errors: dict[int, str] = {}

    def rank_main(rank: int) -> None:
        try:
            dist.init_process_group("threaded", rank=rank, world_size=world, store=store)
            with torch.autograd.set_multithreading_enabled(False):
                results[rank] = fn(rank, default_group(), *args)
            dist.barrier()
        except SystemExit:
            pass  # how the threaded group ends the ranks that wait for a failed one
        except BaseException as error:
            errors[rank] = traceback.format_exc()
            threaded.ProcessLocalGroup.exception_handle(error)
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()

    c10d._set_thread_isolation_mode(True)  # type: ignore[attr-defined]
    threaded._install_threaded_pg()
    threaded.ProcessLocalGroup.reset()
    threads = [threading.Thread(target=rank_main, args=(r,), daemon=True) for r in range(world)]
    try:
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + timeout
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        stuck = [rank for rank, thread in enumerate(threads) if thread.is_alive()]
        if stuck:
            hang = TimeoutError(f"ranks {stuck} still run after {timeout} s")
            threaded.ProcessLocalGroup.exception_handle(hang)
            raise hang
    finally:
        threaded._uninstall_threaded_pg()
        c10d._set_thread_isolation_mode(False)  # type: ignore[attr-defined]
    _raise(errors)
    return results


def run_processes(
    world: int, fn: Callable[..., Any] | str, *args: Any, timeout: float = 120.0
) -> list[Any]:
    """Run ``fn`` (importable, or ``"module:function"``) on ``world`` gloo processes.

    They are forks of one that has imported what takes long and has run nothing. A hang is killed
    after ``timeout`` seconds, with the place of each rank in the message.
    """
    with tempfile.TemporaryDirectory(prefix="graphpar-ranks-") as name:
        folder = Path(name)
        folder.joinpath("job.pickle").write_bytes(pickle.dumps((world, fn, args, timeout)))
        context = _fork_server()
        children = [
            context.Process(target=_rank_process, args=(folder, rank), daemon=True)
            for rank in range(world)
        ]
        for child in children:
            child.start()
        try:
            _wait(children, timeout)
        finally:
            for child in children:
                child.kill()
                child.join()
        return _collect(folder, children, timeout)


@functools.cache
def _fork_server() -> ForkServerContext:
    """Started once in a test session, with the paths and settings of this process."""
    paths = [str(ROOT), *filter(None, sys.path)]
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


def _wait(children: list[ForkServerProcess], timeout: float) -> None:
    """Until all have ended, or five seconds after one has failed, or the time is up."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        codes = [child.exitcode for child in children]
        if None not in codes:
            return
        if any(codes):
            deadline = min(deadline, time.monotonic() + 5.0)
        time.sleep(0.02)


def _collect(folder: Path, children: list[ForkServerProcess], timeout: float) -> list[Any]:
    results: list[Any] = []
    errors: dict[int, str] = {}
    hung = []
    for rank, child in enumerate(children):
        answer = folder / f"{rank}.pickle"
        log = folder / f"{rank}.log"
        text = log.read_text(errors="replace")[-4000:] if log.exists() else ""
        if child.exitcode == 0 and answer.exists():
            results.append(pickle.loads(answer.read_bytes()))
        elif child.exitcode == -signal.SIGKILL:
            hung.append(f"rank {rank} was still running (or was killed):\n{text}")
        else:
            errors[rank] = text
    _raise(errors)
    if hung:
        raise TimeoutError(f"not done after {timeout} s\n" + "\n".join(hung))
    return results


def _raise(errors: dict[int, str]) -> None:
    if errors:
        text = "\n".join(f"rank {rank} failed:\n{error}" for rank, error in errors.items())
        raise RankError(text)


def default_group() -> str:
    """The name of the process group that ``init_process_group`` made."""
    group = dist.group.WORLD
    assert group is not None
    return str(group.group_name)


def _rank_process(folder: Path, rank: int) -> None:
    log = os.open(folder / f"{rank}.log", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    world, fn, args, timeout = pickle.loads(folder.joinpath("job.pickle").read_bytes())
    faulthandler.dump_traceback_later(max(timeout - 3.0, 1.0))
    torch.set_num_threads(1)
    if isinstance(fn, str):
        module, name = fn.split(":")
        fn = getattr(importlib.import_module(module), name)
    store = c10d.FileStore(str(folder / "store"), world)
    dist.init_process_group(
        "gloo", rank=rank, world_size=world, store=store, timeout=timedelta(seconds=timeout)
    )
    result = fn(rank, default_group(), *args)
    folder.joinpath(f"{rank}.pickle").write_bytes(pickle.dumps(result))
    dist.barrier()
    dist.destroy_process_group()
