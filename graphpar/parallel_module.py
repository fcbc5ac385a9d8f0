"""ParallelModule: what :func:`graphpar.transform` returns."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from graphpar.collector import collector_paused
from graphpar.container import Container, mirror, place
from graphpar.errors import CheckpointError, GraphparError, MeshError
from graphpar.interpret import model_state
from graphpar.local import local
from graphpar.mesh import default_device, process_count
from graphpar.ops.agree import check_agreement, meet
from graphpar.ops.kernels import name_on_rank
from graphpar.ops.modes import autocast_off
from graphpar.pipeline import Pipeline, format_pipeline, run_pipeline
from graphpar.printer import format_python
from graphpar.program import Program, program_hash
from graphpar.runtime import compile_program, select, write_buffers
from graphpar.state import (
    cut_whole_tensors,
    distribute,
    full_state,
    in_pieces,
    moved,
    named_state,
    packed_types,
    show_whole_gradient,
    unpadded,
    unsharded,
    with_full_tensor,
)
from graphpar.trace import Tracer, bind, call_key, flatten, signature_of, skeleton, unflatten
from graphpar.trace.fold import draws
from graphpar.trace.skeleton import all_on_meta, hollow_on, on_meta, wholly_on_meta
from graphpar.types import I, Shard, Type

PipelineOf = Callable[[Mapping[str, Type] | None, Mapping[str, Tensor] | None], Pipeline]
"""The pipeline, given the types that parameters already have (at the first call: none), and what
is known of their values."""


@dataclass(frozen=True, slots=True)
class Variant:
    """The program for one form of call: all stages, and the function that runs the last."""

    stages: Mapping[str, Program]
    forward: Callable[..., list[Any]]
    draws: bool
    """Whether masks come from the generator of each rank."""

    @property
    def program(self) -> Program:
        return list(self.stages.values())[-1]


class ParallelModule(Container):
    """An ordinary module: the original's signature, outputs and parameter names.

    Each rank holds its part of the parameters, as DTensors over the tensor-parallel mesh. A call
    with other argument values or training flags than before is traced anew, once, and keeps the
    parameters; of one with other shapes only the plan is made anew, where the model leaves sizes
    free. Without example inputs the first call traces; until then there are no parameters to see.
    """

    def __init__(
        self,
        model: nn.Module,
        pipeline_of: PipelineOf,
        tp: int,
        mesh: DeviceMesh | None,
        tracer: Tracer,
    ) -> None:
        super().__init__(model)
        self._called = True
        self._tp, self._mesh = tp, mesh
        self._pipeline_of = pipeline_of
        self._tracer = tracer
        self._variants: dict[Hashable, Variant] = {}
        self._first: Variant | None = None
        self._started: set[int] = set()
        # In lists, so that they do not register as submodules.
        self._originals: list[nn.Module] = [model]
        self._empty = on_meta(model)
        self._sources: list[nn.Module] = [all_on_meta(model) if self._empty else model]
        self._signature = signature_of(model)
        self._roots: list[Container] = [mirror(model)]
        self._modules = self._roots[0]._modules
        self._parameters = self._roots[0]._parameters
        self._buffers = self._roots[0]._buffers
        self.training = model.training
        self._flagged = list(self.modules())

    def __deepcopy__(self, memo: dict[int, Any]) -> ParallelModule:
        """Parameters, buffers and hooks are copied, what was traced is shared."""
        shared = [self._pipeline_of, self._mesh, self._tracer, self._signature, self._first]
        shared += self._variants.values()
        if self._first is not None:
            shared += [*self._originals, *self._sources]
        memo.update((id(value), value) for value in shared if value is not None)
        made = type(self).__new__(type(self))
        memo[id(self)] = made
        vars(made).update((name, copy.deepcopy(x, memo)) for name, x in vars(self).items())
        if made._first is not None:
            made._show_whole()
        return made

    @property
    def _source(self) -> nn.Module:
        """What is traced: the given model, later its skeleton."""
        return self._sources[0]

    # --- tracing ---

    def prepare(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Variant:
        """The variant for such a call, traced now if it is new; its tensors are ordinary ones."""
        args, kwargs = bind(self._signature, args, kwargs)
        if self._empty:
            args, kwargs = pytree.tree_map_only(Tensor, lambda x: x.to("meta"), (args, kwargs))
        key = self._key(args, kwargs)
        if key not in self._variants:
            with torch.inference_mode(False), collector_paused():
                self._variants[key] = self._trace(args, kwargs)
        return self._variants[key]

    def _key(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Hashable:
        return call_key(args, kwargs), self._flags()

    def _flags(self) -> Hashable:
        return tuple([module.training for module in self._flagged])

    def _trace(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Variant:
        known = None if self._first is None else self._first.program.state
        self._copy_flags()
        program = self._tracer.trace(self._source, args, kwargs, flags=self._flags())
        types = None if known is None else {name: s.type for name, s in known.items()}
        stages = run_pipeline(program, self._pipeline_of(types, self._whole_values()))
        program = list(stages.values())[-1]
        if self._mesh is not None and self._tp > 1:
            check_agreement(program_hash(program), self._group, "program", _summary(program))
        rank, _ = self.place_in_mesh()
        forward = compile_program(program, self._own_group, rank)
        variant = Variant(stages, forward, any(map(_draws, program.graphs())))
        if self._first is None:
            self._first = variant
            self._adopt(program)
        for path in program.calls:
            self.get_submodule(path)._called = True  # type: ignore[assignment]
        return variant

    def _whole_values(self) -> dict[str, Tensor]:
        """Parameters and buffers that this rank has whole, by their canonical names."""
        if self._first is None:
            return model_state(self._originals[0])
        states, held = self._first.program.state, self.local_tensors()
        return {
            name: held[name]
            for name, state in states.items()
            if name in held and not isinstance(state.type, Shard)
        }

    def _copy_flags(self) -> None:
        sources = dict(self._source.named_modules(remove_duplicate=False))
        for name, module in self.named_modules(remove_duplicate=False):
            if name in sources:
                sources[name].training = module.training

    def _adopt(self, program: Program) -> None:
        """Take the model's parameters and buffers, cut as the program says; keep a skeleton."""
        model = self._originals[0]
        kinds = {name: state for state in program.state.values() for name in state.names}
        memo: dict[int, Tensor] = {}
        buffers = {id(b) for b in model.buffers()}
        persistent = set(model.state_dict(keep_vars=True))
        for name, value in named_state(model):
            if id(value) not in memo:
                memo[id(value)] = self._own(value, kinds[name].type, id(value) in buffers)
            place(self, name, memo[id(value)], persistent=name in persistent)
        self._show_whole()
        same = self._empty and wholly_on_meta(model)
        self._originals[0] = self._sources[0] if same else skeleton(model)
        if not self._empty:
            self._sources[0] = self._originals[0]
        self.register_load_state_dict_pre_hook(_take_whole)  # type: ignore[no-untyped-call]

    def _own(self, value: Tensor, kind: Type, is_buffer: bool) -> Tensor:
        if is_buffer:
            return value.detach().clone()
        if self._mesh is not None and self._tp > 1:
            local: Tensor = distribute(value, kind, self._mesh)
        elif self._tp > 1:
            local = value.detach()
        else:
            local = value.detach().clone()
        return nn.Parameter(local, requires_grad=value.requires_grad)

    def _show_whole(self) -> None:
        """Let ``full_tensor`` of parameters and gradients of several blocks give the original's."""
        kinds = packed_types(self.program.state.values())
        for name, parameter in self.named_parameters():  # each once
            if isinstance(parameter, DTensor) and name in kinds:
                with_full_tensor(parameter, kinds[name])
                if parameter.requires_grad:
                    hook = partial(show_whole_gradient, kinds[name])
                    parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    @property
    def _group(self) -> str:
        return "tp" if self._mesh is None else self._mesh.get_group().group_name

    @property
    def _own_group(self) -> str:
        return name_on_rank(self._group, self.place_in_mesh()[0])

    # --- running ---

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The original's forward."""
        if self._tp > 1 and self._mesh is None:
            raise MeshError(
                f"tp={self._tp} needs {self._tp} processes, not {process_count()}: start them with "
                f"torchrun --nproc-per-node {self._tp}, or read, print and simulate the program "
                "without calling it"
            )
        if self._first is not None and self._empty:
            raise GraphparError(
                "the model is on the meta device, without values: call load_safetensors, "
                "load_checkpoint, or allocate and load_state_dict"
            )
        args, kwargs = bind(self._signature, args, kwargs)
        key = self._key(args, kwargs)
        variant = self._variants.get(key) or self.prepare(args, kwargs)
        program = variant.program
        leaves, _ = flatten(args, kwargs)
        self._check_random_state(variant)
        with autocast_off():
            results = variant.forward(self._roots[0], *select(leaves, program))
        count = len(results) - len(program.mutations)
        if program.mutations:
            write_buffers(self, dict(zip(program.mutations, results[count:], strict=True)))
        return unflatten(results[:count], program.out_spec)

    def _check_random_state(self, variant: Variant) -> None:
        """Before its first run: ranks that draw masks must draw the same ones."""
        if self._tp == 1 or self._mesh is None or not variant.draws:
            return
        if id(variant) in self._started:
            return
        self._started.add(id(variant))
        state = torch.get_rng_state()
        if self._mesh.device_type == "cuda":
            state = torch.cuda.get_rng_state()
        digest = hashlib.sha256(state.numpy().tobytes()).hexdigest()
        check_agreement(digest, self._group, "random state", "call torch.manual_seed")

    # --- memory ---

    def allocate(self, device: torch.device | str | None = None) -> None:
        """Give a model on the meta device memory (with any values); else do nothing.

        Default: on the accelerator, if there is one, else on the CPU. Make optimizers after it.

        Raises:
            CheckpointError: buffers that no checkpoint holds have no values.
        """
        self._known()
        if not self._empty:
            return
        where = torch.device(device) if device is not None else default_device()
        lost = [n for n, s in self.program.state.items() if s.kind == "buffer" and not s.persistent]
        lost = [name for name in lost if self.get_buffer(name).is_meta]
        if lost:
            raise CheckpointError(
                f"no checkpoint holds the buffers {', '.join(lost)}: give them values before "
                "transform (make the model with its parameters alone on the meta device)"
            )
        memo: dict[int, Tensor] = {}
        persistent = set(self.state_dict())
        for name, value in list(named_state(self)):
            if id(value) not in memo:
                memo[id(value)] = moved(value, where)
            place(self, name, memo[id(value)], persistent=name in persistent)
        self._show_whole()
        self._sources[0] = self._originals[0] = hollow_on(self._originals[0], where)
        self._empty = False
        self._variants.clear()
        self._tracer = Tracer(self._tracer.mode)

    def local_tensors(self) -> dict[str, Tensor]:
        """What this rank holds of each parameter and buffer, by all names; the memory is shared."""
        kinds = packed_types(self._known().program.state.values())
        place = self.place_in_mesh()
        return {
            name: unpadded(local(value).detach(), kinds.get(name, I), *place)
            for name, value in named_state(self)
        }

    def place_in_mesh(self) -> tuple[int, int]:
        """This rank among the tensor-parallel ranks, and their number."""
        return (0, 1) if self._mesh is None else (self._mesh.get_local_rank(), self._mesh.size())

    # --- reading ---

    def _known(self) -> Variant:
        if self._first is None:
            raise GraphparError(
                "the model has not been traced: call it once, or give example inputs to transform"
            )
        return self._first

    @property
    def stages(self) -> Mapping[str, Program]:
        """The program after each pass, by the pass's name; "trace" is the first."""
        return self._known().stages

    @property
    def program(self) -> Program:
        """The program that runs: the last stage."""
        return self._known().program

    @property
    def pipeline(self) -> str:
        """The passes as text, which :func:`graphpar.pipeline.parse_pipeline` reads."""
        return format_pipeline(self._pipeline_of(None, None))

    @property
    def report(self) -> Mapping[str, Any]:
        """What passes report; "trace": layers traced once. "partition": objective, bound, seconds,
        axes cut unevenly, products that all ranks do whole, the share of work wasted by these."""
        return self.program.report

    def print_readable(self) -> str:
        """Print the rewritten program as Python; also returns the text."""
        text = format_python(self.program)
        print(text)
        return text

    def full_state_dict(self) -> dict[str, Tensor]:
        """The original's state dict with whole plain tensors; all ranks must call it.

        Raises:
            RankMismatchError: after half a minute, if another rank does not.
        """
        if self._mesh is not None:
            meet(self._group, "full_state_dict")
        states = list(self._known().program.state.values())
        names = list(self.state_dict())
        with unsharded(self):
            values = dict(named_state(self))
            return full_state({name: values[name] for name in names}, states, self._mesh)

    # --- until traced ---

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        self._known()
        return super().named_parameters(*args, **kwargs)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """As any module's; parameters are DTensors that ``torch.distributed.checkpoint`` takes."""
        self._known()
        found = super().state_dict(*args, **kwargs)
        if self._mesh is None or kwargs.get("keep_vars", False):
            return found
        prefix = kwargs.get("prefix", "")
        for name, kind in packed_types(self.program.state.values()).items():
            value = found.get(prefix + name)
            if isinstance(value, DTensor):
                found[prefix + name] = in_pieces(value, kind)
        return found


def _draws(named: tuple[str, fx.Graph]) -> bool:
    own = torch.ops.graphpar.dropout.default
    return any(draws(node) or node.target is own for node in named[1].nodes)


def _summary(program: Program) -> str:
    return f"{len(program.state)} state tensors, blocks {', '.join(program.blocks) or 'none'}"


def _take_whole(module: nn.Module, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
    """Let a checkpoint of the unmodified model be loaded."""
    assert isinstance(module, ParallelModule)
    states = module.program.state.values()
    parameters = dict(module.named_parameters(remove_duplicate=False))
    cut_whole_tensors(state_dict, prefix, states, parameters)
