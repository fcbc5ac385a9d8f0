"""A call of a layer while it is traced: what it calls is followed as far as it is known."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.weak import TensorWeakRef, WeakTensorKeyDictionary

from graphpar.trace.events import (
    Event,
    Reader,
    Result,
    Root,
    Shortcut,
    Step,
    Unrecordable,
    as_placed,
    constant_of,
    content,
    metadata,
    results_of,
)
from graphpar.trace.report import LayerTrace


@dataclass(slots=True)
class Layer:
    """A call of a layer, while it runs under ``tracer``.

    ``values`` are the results of its events, in order. They are not kept alive: torch gives Python
    a copy of what a factory made if anyone holds it. ``handed``: all that stand for results.
    """

    trace: LayerTrace
    tracer: Any
    at: Event | Root
    handed: WeakTensorKeyDictionary
    numbers: dict[int, int] = field(default_factory=dict)
    values: list[TensorWeakRef] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    inputs: list[Tensor] = field(default_factory=list)
    path: list[tuple[Event, tuple[int, ...]]] = field(default_factory=list)
    following: bool = True
    recording: bool = True
    busy: bool = False

    def add(self, value: Tensor) -> None:
        self.numbers[id(value)] = len(self.values)
        self.values.append(TensorWeakRef(value))

    def number(self, value: Tensor) -> int | None:
        """The number of the value that ``value`` is at present; ``None`` if it is none."""
        number = self.numbers.get(id(value))
        return number if number is not None and self.values[number]() is value else None

    def constants(self) -> Callable[[Tensor], Tensor | None]:
        """Gives copies of the constants of values, which share memory as these do."""
        copies: dict[int, Tensor] = {}

        def copy(value: Tensor) -> Tensor | None:
            constant = constant_of(value)
            if constant is None:
                return None
            with _disable_current_modes():
                memory = constant.untyped_storage()
                if memory._cdata not in copies:
                    whole = torch.empty(0, dtype=constant.dtype).set_(memory.clone())
                    copies[memory._cdata] = whole
                return as_placed(constant, copies[memory._cdata])

        return copy

    def alive(self) -> Iterator[tuple[int, Tensor]]:
        for number, reference in enumerate(self.values):
            value = reference()
            if value is not None and self.numbers[id(value)] == number:
                yield number, value

    def reader(self) -> Reader:
        return Reader(self.number, self.tracer.tensor_tracker)

    def take(self, known: Shortcut, operands: Sequence[Tensor]) -> Any:
        """What a known call of a torch function gives."""
        self.trace.ops += len(known.events)
        kept = []  # until the next event has taken them
        for event, places in known.events:
            given = [None if place is None else operands[place] for place in places]
            kept.append(self.follow(event, given))
        values = [self.values[number]() for number in known.results]
        return values[0] if known.several is None else known.several(values)

    def follow(self, event: Event, operands: Sequence[Tensor | None]) -> Any:
        """What a known op gives; inner operands need not be given."""
        places = []
        for operand, number in zip(operands, event.inner, strict=True):
            if number is None:
                assert operand is not None
                places.append((False, len(self.inputs)))
                self.inputs.append(operand)
            else:
                places.append((True, number))
        self.at = event
        self.trace.shared += 1
        self.trace.like = event.layer
        if event.number is not None:
            return event.number
        self.steps.append(Step(event, tuple(places), self.module_path()))
        outs: list[Any] = [None] * (event.several[1] if event.several else 1)

        def given(place: int) -> Tensor | None:
            inner = event.inner[place]
            return operands[place] if inner is None else self.values[inner]()

        for result in event.results:
            if result.same is not None:
                value = given(result.same)
            else:
                value = result.fake(None if result.within is None else given(result.within))
                self.handed[value] = True
            assert value is not None
            self.add(value)
            outs[result.place or 0] = value
        return outs[0] if event.several is None else event.several[0](outs)

    def module_path(self) -> str:
        """The innermost module call, as :func:`graphpar.trace.lower.module_path` tells it."""
        key, (path, _) = next(reversed(self.tracer.module_stack.items()))
        path = path.removeprefix("_export_root").removeprefix(".")
        _, at, repeat = key.rpartition("@")
        return f"{path}@{repeat}" if at and repeat.isdigit() else path

    def enter(self, events: fx.Graph, key: Any, target: Any, args: tuple[Any, ...]) -> None:
        """Note that a region begins or ends."""
        node = events.create_node("call_function", target, args)
        self.go(key, Event(node, (), (), (), None, self.trace.path), ())

    def go(self, key: Any, event: Event, operands: Sequence[Tensor]) -> None:
        """Note that ``event`` came next."""
        self.at.next[key] = self.at = event
        self.path.append((event, tuple(map(id, operands))))

    def record(self, events: fx.Graph, key: Any, reader: Reader, run: Callable[[], Any]) -> Any:
        """Run an op, and note what it gave."""
        operands = reader.operands
        graph = self.tracer.graph
        last = next(iter(reversed(graph.nodes)))
        written = key[0][0]._schema.is_mutable
        known = [*(value for _, value in self.alive()), *operands] if written else []
        before = [_look(value) for value in known]
        nodes = [self.node_of(operand) for operand in operands]
        out = run()
        try:
            if [_look(value) for value in known] != before:
                raise Unrecordable("it changes what a tensor looks like, or a constant")
            if type(out) in (bool, int, float) and reader.by_value:
                self.go(key, self.reading(events, key, operands, out), operands)
                return out
            node = _node_of(last, graph)
            results = results_of(out, operands, reader.by_value)
            event = self.event(events, node, nodes, operands, results, out)
        except Unrecordable:
            self.recording = False
            return out
        self.go(key, event, operands)
        for result in results:
            self.add(out if result.place is None else out[result.place])
        return out

    def reading(self, events: fx.Graph, key: Any, operands: Sequence[Tensor], number: Any) -> Event:
        """That Python reads a constant."""
        inner = tuple(map(self.number, operands))
        if any(constant_of(operand) is None for operand in operands):
            raise Unrecordable("it gives a number that is not of constants alone")
        node = events.create_node("call_function", key[0][0], ())
        return Event(node, (), inner, (), None, self.trace.path, number)

    def node_of(self, value: Tensor) -> fx.Node | None:
        slot = self.tracer.tensor_tracker.get(value)
        return None if slot is None else slot.proxy.node

    def event(
        self,
        events: fx.Graph,
        node: fx.Node,
        nodes: list[fx.Node | None],
        operands: list[Tensor],
        results: tuple[Result, ...],
        out: Any,
    ) -> Event:
        inputs: list[fx.Node] = []

        def stand_in(value: fx.Node) -> fx.Node:
            if len(inputs) == len(nodes) or nodes[len(inputs)] not in (value, None):
                raise Unrecordable("it enters the graph with other operands")
            made = events.placeholder(f"x{len(inputs)}")
            made.meta = {"val": value.meta.get("val")}
            inputs.append(made)
            return made

        args, kwargs = fx.map_arg((node.args, node.kwargs), stand_in)
        if len(inputs) != len(operands):
            raise Unrecordable("it enters the graph with other operands")
        copy = events.create_node("call_function", node.target, args, kwargs)
        copy.meta = {"val": node.meta["val"], "stack_trace": node.meta.get("stack_trace")}
        several = (type(out), len(out)) if isinstance(out, (tuple, list)) else None
        inner = tuple(map(self.number, operands))
        return Event(copy, tuple(inputs), inner, results, several, self.trace.path)

    def shortcut(self, count: int, operands: Sequence[Tensor], out: Any) -> Shortcut | None:
        """The events from ``count`` on; ``None`` if one has operands that the call was not given,
        or the call gave other things than their results."""
        position = {id(operand): i for i, operand in reversed(list(enumerate(operands)))}
        steps = []
        for event, ids in self.path[count:]:
            if not event.is_op:
                return None
            places = [
                position.get(each) if inner is None else None
                for each, inner in zip(ids, event.inner, strict=True)
            ]
            if any(p is None and n is None for p, n in zip(places, event.inner, strict=True)):
                return None
            steps.append((event, tuple(places)))
        several = type(out) if isinstance(out, (tuple, list)) else None
        results = [out] if several is None else out
        numbers = [self.number(x) if isinstance(x, Tensor) else None for x in results]
        if any(number is None for number in numbers) or several not in (None, tuple, list):
            return None
        return Shortcut(tuple(steps), tuple(numbers), several)  # type: ignore[arg-type]


def _look(value: Tensor) -> Any:
    try:
        constant = constant_of(value)
        return metadata(value), None if constant is None else content(constant)
    except Unrecordable:
        return None


def _node_of(last: fx.Node, graph: fx.Graph) -> fx.Node:
    """The one op among the nodes after ``last``; others only name its operands and results."""
    made = itertools.takewhile(lambda node: node is not last, reversed(graph.nodes))
    ops: list[fx.Node] = [
        n for n in made if n.op == "call_function" and n.target is not operator.getitem
    ]
    if len(ops) != 1 or "val" not in ops[0].meta:
        raise Unrecordable("it enters the graph as several ops")
    return ops[0]
