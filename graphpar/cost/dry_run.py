"""Run a local program on tensors without memory, and see what autograd keeps.

Nothing about any op is written down here: each op runs once on fake tensors, under autograd, and
:class:`torch.autograd.graph.saved_tensors_hooks` tells what it keeps. Tensors count by storage, so
a view keeps its base, and what two ops keep counts once. A block runs once for each form of its
arguments, however often it is called.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, fx
from torch._C._distributed_c10d import (
    ProcessGroup,
    _register_process_group,
    _unregister_process_group,
)
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed import distributed_c10d
from torch.utils.weak import WeakIdKeyDictionary

from graphpar.cost.backward import backward_kernels, leading_to, loss_values
from graphpar.cost.kernels import Kernel, KernelRecorder
from graphpar.cost.links import linked
from graphpar.errors import InternalError
from graphpar.program import (
    MESH_DIM,
    Program,
    Region,
    TensorSpec,
    info,
    of_rank,
    outputs,
    placeholders,
    region_again,
)
from graphpar.types import I, Type, local_shape
from graphpar.unfuse import gathered_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Storage:
    """Memory that a graph touches: of an input, of state (``resident``), or that a node makes."""

    nbytes: int
    maker: fx.Node | None = None
    resident: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One node's run. Numbers are keys of :attr:`GraphRun.storages`.

    ``reads`` are the storages of its arguments, ``results`` those of its results and ``saves``
    those that autograd keeps for it, in order. ``identity``: it gives the very tensor that it got.
    ``backward`` are the kernels of its backward, if they were asked for.
    ``inner_bytes`` is what a called block keeps beside its arguments and results.
    """

    node: fx.Node
    kernels: tuple[Kernel, ...] = ()
    reads: tuple[int, ...] = ()
    results: tuple[int, ...] = ()
    saves: tuple[int, ...] = ()
    identity: bool = False
    backward: tuple[Kernel, ...] = ()
    block: GraphRun | None = None

    @property
    def inner_bytes(self) -> int:
        return 0 if self.block is None else self.block.inner_bytes

    @property
    def again(self) -> Iterator[Kernel]:
        """What a second run adds to backward: the gather of a fused op that backward would gather
        for is there anyway."""
        fused = gathered_bytes(self.node) > 0
        return (k for k in self.kernels if not (fused and k.collective))


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphRun:
    """What one run of a graph touches and keeps; ``inputs`` and ``outputs`` may be no tensors."""

    storages: dict[int, Storage]
    steps: tuple[Step, ...]
    inputs: tuple[int | None, ...]
    outputs: tuple[int | None, ...]

    @property
    def saved(self) -> set[int]:
        """The storages that autograd keeps, state left out."""
        kept = {s for step in self.steps for s in step.saves}
        return {s for s in kept if not self.storages[s].resident}

    @property
    def saved_bytes(self) -> int:
        """All that autograd keeps of this graph and the blocks it calls, state left out."""
        own = sum(self.storages[s].nbytes for s in self.saved)
        return own + sum(step.inner_bytes for step in self.steps)

    @property
    def kernels(self) -> Iterator[Kernel]:
        """All kernels of the forward, in order, those of called blocks too."""
        for step in self.steps:
            yield from step.kernels if step.block is None else step.block.kernels

    @property
    def backward(self) -> Iterator[Kernel]:
        """The kernels of the backward, in order, those of called blocks too, replays left out."""
        for step in reversed(self.steps):
            yield from step.backward if step.block is None else step.block.backward

    @property
    def replayed(self) -> Iterator[Kernel]:
        """The kernels that backward runs again."""
        for step in self.steps:
            if step.block is not None:
                yield from step.block.replayed
            elif info(step.node).replay:
                yield from step.again

    @property
    def inner_bytes(self) -> int:
        """What it keeps beside its inputs and outputs."""
        inner = self.saved - set(self.inputs) - set(self.outputs)
        return sum(self.storages[s].nbytes for s in inner)


def dry_run(
    program: Program, *, trained_inputs: Collection[str] | None = None, backward: bool = False
) -> GraphRun:
    """Run the root of a program of form "whole" or "local" as rank 0, without memory.

    Inputs are contiguous; those named in ``trained_inputs`` (default: all of floating point) need
    a gradient. Tensors are fake ones on the devices of the program, so composite ops
    take the path of that device. ``backward``: run the backward of each op that leads
    to the loss too, for its kernels (see :func:`graphpar.cost.backward.loss_values`).
    """
    if program.form == "typed":
        raise InternalError("a program whose ops are not local cannot run")
    with (
        planned_group(program.ranks) as group,
        torch.random.fork_rng(devices=[]),
        torch.enable_grad(),
        FakeTensorMode(),
    ):
        run = _Runner(program, group, backward)
        inputs = [run.tensor(node, trained_inputs) for node in placeholders(program.graph)]
        return run.graph(program.graph, "", inputs)[0]


@contextmanager
def planned_group(ranks: int) -> Iterator[str]:
    """The name of a process group of which this process is rank 0, and that no process joins.

    It has shapes, on fake and on meta tensors, but sends nothing.
    """
    name = f"graphpar-planned-{ranks}"
    group = ProcessGroup(0, ranks)  # type: ignore[call-arg]
    _register_process_group(name, group)  # type: ignore[arg-type]
    distributed_c10d._world.pg_backend_config[group] = "planned"  # not gloo: see ops.kernels
    try:
        yield name
    finally:
        del distributed_c10d._world.pg_backend_config[group]
        _unregister_process_group(name)  # type: ignore[arg-type]


class _Kept:
    """What autograd holds in place of a tensor that it saves; gone when autograd drops it."""

    __slots__ = ("__weakref__", "storage", "tensor")

    def __init__(self, tensor: Tensor, storage: int) -> None:
        self.tensor, self.storage = tensor, storage


class _Storages:
    """Numbers for the storages of one graph's run, in the order of their first use."""

    def __init__(self, resident: Callable[[Tensor], bool]) -> None:
        self.found: dict[int, Storage] = {}
        self._numbers: dict[int, int] = {}
        self._held: list[Any] = []  # an address is not used again while its storage is held
        self._resident = resident

    def number(self, x: Tensor, maker: fx.Node | None = None) -> int:
        storage = x.untyped_storage()
        address = storage._cdata
        if address not in self._numbers:
            self._numbers[address] = len(self._held)
            self._held.append(storage)
            self.found[self._numbers[address]] = Storage(
                nbytes=storage.nbytes(), maker=maker, resident=self._resident(x)
            )
        return self._numbers[address]

    def known(self, x: Tensor) -> int | None:
        return self._numbers.get(x.untyped_storage()._cdata)


class _Runner:
    def __init__(self, program: Program, group: str, backward: bool) -> None:
        self.program, self.group, self.backward = program, group, backward
        self.ranks = program.ranks if program.form == "local" else 1
        self.state: dict[str, Tensor] = {}
        self._resident: dict[int, Any] = {}
        self._blocks: dict[Hashable, tuple[GraphRun, list[Any]]] = {}
        self._used = WeakIdKeyDictionary()
        self._held: list[_Kept] = []  # to the end
        self._leading = leading_to(loss_values(program.graph)) if backward else set()

    def tensor(self, node: fx.Node, trained: Collection[str] | None) -> Any:
        spec = info(node).spec
        kind = info(node).type
        assert isinstance(spec, TensorSpec)
        grad = spec.differentiable and (trained is None or node.name in trained)
        return self._empty(spec, I if kind is None else kind, grad)  # type: ignore[arg-type]

    def _empty(self, spec: TensorSpec, kind: Type, grad: bool) -> Tensor:
        shape = local_shape(spec.shape, kind, 0, self.ranks)
        return torch.empty(shape, dtype=spec.dtype, device=spec.device, requires_grad=grad)

    def _read(self, name: str) -> Tensor:
        canonical = self.program.canonical(name)
        if canonical not in self.state:
            known = self.program.state[canonical]
            grad = known.kind == "parameter" and known.spec.differentiable
            value = self._empty(known.spec, known.type, grad)
            self.state[canonical] = value
            self._resident[value.untyped_storage()._cdata] = value
        return self.state[canonical]

    def graph(
        self, graph: fx.Graph, path: str, inputs: Sequence[Any]
    ) -> tuple[GraphRun, list[Any]]:
        """Run the root, or the block called at ``path``."""
        storages = _Storages(lambda x: x.untyped_storage()._cdata in self._resident)
        entries = [storages.number(x) if isinstance(x, Tensor) else None for x in inputs]
        env: dict[fx.Node, Any] = dict(zip(placeholders(graph), inputs, strict=True))
        steps: list[tuple[Step, list[weakref.ref[_Kept]]]] = []
        entered = set[Region]()
        given = _given_again(graph)
        named = {node.name: node for node in graph.nodes}
        for node in graph.nodes:
            if node.op == "get_attr":
                env[node] = self._read(f"{path}.{node.target}" if path else str(node.target))
            elif node.op in ("call_function", "call_module"):
                step, held = self._step(node, env, storages)
                region = info(node).region
                values = [env[node]] if node in given else []
                if region is not None and region not in entered:
                    entered.add(region)
                    values += [env[named[name]] for name in region.kept]
                held += [self._keep(x, storages.number(x)) for x in _tensors(values)]
                steps.append((step, held))
        values = [env[v] if isinstance(v, fx.Node) else v for v in outputs(graph)]
        env.clear()  # what no output leads to is not kept
        run = GraphRun(
            storages=storages.found,
            steps=tuple(_alive(step, kept) for step, kept in steps),
            inputs=tuple(entries),
            outputs=tuple(storages.number(v) if isinstance(v, Tensor) else None for v in values),
        )
        return run, values

    def _step(
        self, node: fx.Node, env: dict[fx.Node, Any], storages: _Storages
    ) -> tuple[Step, list[weakref.ref[_Kept]]]:
        call = of_rank((node.args, node.kwargs), 0)
        args, kwargs = fx.node.map_arg(call, env.__getitem__)
        reads = tuple(storages.number(x) for x in _tensors((args, kwargs)))
        if node.op == "call_module":
            step, env[node] = self._call(node, args, reads, storages)
            return step, []
        kept: list[weakref.ref[_Kept]] = []

        def pack(x: Tensor) -> _Kept:
            number = storages.number(x, node)
            held = _Kept(x, number)
            if info(node).region is None:
                kept.append(weakref.ref(held))
            elif not _runs_again(storages.found[number].maker, info(node).region):
                kept.append(self._keep(x, number))
            return held

        target: Any = node.target
        args = tuple(self.group if isinstance(a, str) and a == MESH_DIM else a for a in args)
        recorder = KernelRecorder()
        with recorder, torch.autograd.graph.saved_tensors_hooks(pack, lambda held: held.tensor):
            env[node] = target(*args, **kwargs)
        back: tuple[Kernel, ...] = ()
        if self.backward and (node.graph is not self.program.graph or node in self._leading):
            back = backward_kernels(target, args, kwargs, self._used)
        results = tuple(storages.number(x, node) for x in _tensors(env[node]))
        step = Step(
            node=node,
            kernels=tuple(recorder.kernels),
            reads=reads,
            results=results,
            identity=any(env[node] is x for x in _tensors((args, kwargs))),
            backward=back,
        )
        return step, kept

    def _keep(self, x: Tensor, number: int) -> weakref.ref[_Kept]:
        """Regions keep tensors as long as anything of theirs is kept."""
        self._held.append(_Kept(x, number))
        return weakref.ref(self._held[-1])

    def _call(
        self, node: fx.Node, args: Sequence[Any], reads: tuple[int, ...], storages: _Storages
    ) -> tuple[Step, list[Any]]:
        """Run a block, or repeat what a run of it on alike arguments gave."""
        block = self.program.calls[str(node.target)]
        key = block, _form(args, reads)
        values: list[Any] | None = None
        if key not in self._blocks:
            inner = [_detached(a) for a in args]
            run, values = self.graph(self.program.blocks[block], str(node.target), inner)
            self._blocks[key] = run, [_detached(v) for v in values]
        run, forms = self._blocks[key]
        mine = dict(zip(run.inputs, args, strict=True))
        results = linked(run.outputs, mine, forms)
        own = {n: storages.number(x) for n, x in mine.items() if n is not None}
        for number, value in zip(run.outputs, results, strict=True):
            if number is not None:
                own.setdefault(number, storages.number(value, node))
        step = Step(
            node=node,
            reads=reads,
            results=tuple(storages.number(x) for x in _tensors(results)),
            saves=tuple(own[s] for s in sorted(run.saved) if s in own),
            block=run,
        )
        return step, results


def _given_again(graph: fx.Graph) -> set[fx.Node]:
    """The nodes inside regions whose values second runs are given."""
    found = set[fx.Node]()
    for region, nodes in groupby(list(graph.nodes), lambda node: info(node).region):
        found.update(region_again(list(nodes))[1] if region is not None else ())
    return found


def _runs_again(maker: fx.Node | None, region: Region | None) -> bool:
    return maker is not None and info(maker).region == region and info(maker).replay


def _alive(step: Step, kept: Sequence[weakref.ref[_Kept]]) -> Step:
    """The step with the storages that autograd has not dropped since."""
    if step.block is not None:
        return step
    held = [found for ref in kept if (found := ref()) is not None]
    return replace(step, saves=tuple(found.storage for found in held))


def _tensors(value: Any) -> list[Tensor]:
    return [x for x in torch.utils._pytree.tree_leaves(value) if isinstance(x, Tensor)]


def _form(args: Sequence[Any], reads: Sequence[int]) -> Hashable:
    """All that a block's run depends on: the arguments' forms, and which share memory."""
    first = [reads.index(number) for number in reads]
    return tuple(
        (tuple(x.shape), x.stride(), x.storage_offset(), x.dtype, x.device, x.requires_grad)
        if isinstance(x, Tensor)
        else x
        for x in args
    ), tuple(first)


def _detached(x: Any) -> Any:
    return x.detach().requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x
