"""The training runs of ``graphpar demo``: one process, or several gloo processes."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import sys
import sysconfig
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C import _distributed_c10d as c10d

from graphpar.api import transform
from graphpar.errors import GraphparWarning

SEED = 0
MAX_NORM = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Sizes of the demo's model and data; the vocabulary is the 256 bytes."""

    steps: int
    batch: int = 4
    length: int = 64
    width: int = 128
    heads: int = 8
    layers: int = 4
    learning_rate: float = 1e-3


@dataclass(frozen=True, slots=True)
class Step:
    """One step's loss (before the update) and the seconds it took."""

    loss: float
    seconds: float


def make_model(setting: Setting) -> nn.Module:
    """A GPT-2 of transformers with random weights, the same in every process."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(SEED)
    config = GPT2Config(
        n_layer=setting.layers,
        n_head=setting.heads,
        n_embd=setting.width,
        n_positions=setting.length,
        vocab_size=256,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
    )
    model = GPT2LMHeadModel(config)
    model.loss_type = "ForCausalLM"  # what it takes by itself, with a message
    trained: nn.Module = model.train()
    return trained


def make_batches(setting: Setting) -> Tensor:
    """Random windows of the sources of Python's standard library, as bytes.

    [steps, batch, length], int64.
    """
    folder = Path(sysconfig.get_path("stdlib"))
    data = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py")))
    text = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    seeded = torch.Generator().manual_seed(SEED)
    starts = torch.randint(
        len(text) - setting.length, (setting.steps, setting.batch), generator=seeded
    )
    return text[starts[:, :, None] + torch.arange(setting.length)].long()


def make_call(tokens: Tensor) -> dict[str, Tensor]:
    return {"input_ids": tokens, "labels": tokens}


def train(model: nn.Module, setting: Setting) -> Iterator[Step]:
    """Train; nothing here knows whether ``model`` is partitioned."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=setting.learning_rate)
    torch.manual_seed(SEED)  # the dropout masks
    for tokens in make_batches(setting):
        started = time.perf_counter()
        loss = model(**make_call(tokens)).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        yield Step(loss.item(), time.perf_counter() - started)


def train_single(setting: Setting) -> Iterator[Step]:
    """Train the unmodified model in this process, on one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng():
            yield from train(make_model(setting), setting)
    finally:
        torch.set_num_threads(threads)


def train_parallel(setting: Setting, tp: int) -> Iterator[Step]:
    """Train the partitioned model in ``tp`` processes of one thread each; rank 0's steps."""
    context = multiprocessing.get_context("spawn")
    ranks: list[tuple[BaseProcess, Connection]] = []
    with tempfile.TemporaryDirectory(prefix="graphpar-demo-") as folder:
        try:
            with _interrupts_ignored():
                for rank in range(tp):
                    ours, theirs = context.Pipe(duplex=False)
                    arguments = (rank, tp, f"{folder}/store", setting, theirs)
                    process: BaseProcess = context.Process(
                        target=_rank_main, args=arguments, daemon=True
                    )
                    process.start()
                    theirs.close()
                    ranks.append((process, ours))
            yield from _collect(ranks)
        finally:
            for process, ours in ranks:
                process.terminate()
                process.join()
                ours.close()


@contextmanager
def _interrupts_ignored() -> Iterator[None]:
    """Processes started within leave Ctrl-C to their parent, which ends them."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _collect(ranks: list[tuple[BaseProcess, Connection]]) -> Iterator[Step]:
    """Rank 0's steps, until every rank has closed its end; a rank's error is raised here."""
    open_ends = {ours: rank for rank, (_, ours) in enumerate(ranks)}
    while open_ends:
        for ready in wait(list(open_ends)):
            assert isinstance(ready, Connection)
            try:
                message = ready.recv()
            except EOFError:
                rank = open_ends.pop(ready)
                ranks[rank][0].join()
                if ranks[rank][0].exitcode:
                    raise RuntimeError(
                        f"rank {rank} ended with exit code {ranks[rank][0].exitcode}"
                    ) from None
                continue
            if isinstance(message, Step):
                yield message
            else:
                error, text = message
                error.add_note(f"on rank {open_ends[ready]}")
                raise error from RuntimeError(text)


def _rank_main(rank: int, tp: int, store: str, setting: Setting, parent: Connection) -> None:
    try:
        for step in _train_rank(rank, tp, store, setting):
            if rank == 0:
                parent.send(step)
    except Exception as error:
        parent.send((_sendable(error), traceback.format_exc()))


def _train_rank(rank: int, tp: int, store: str, setting: Setting) -> Iterator[Step]:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", GraphparWarning)  # the parent has shown them
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    dist.init_process_group(
        "gloo",
        store=c10d.FileStore(store, tp),
        rank=rank,
        world_size=tp,
        timeout=timedelta(seconds=120),
    )
    try:
        example = make_call(make_batches(setting)[0])
        model = transform(make_model(setting), example_kwargs=example, tp=tp, sp=True, rng="exact")
        yield from train(model, setting)
        dist.barrier()
    finally:
        dist.destroy_process_group()


def _sendable(error: Exception) -> Exception:
    """The error itself if it can cross processes, else its text."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
