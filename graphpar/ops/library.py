"""Registration of the ops with torch, and their autograd.

An op's kernel at the Autograd key runs the conversion itself, so the functional collectives of
torch are what compilers see, and eager mode pays one dispatch (``register_autograd`` costs about
20 us a call more). Its backward is the op that the table names, so derivatives of any order exist.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from graphpar.local import applied, local, local_all
from graphpar.ops import fused, seeded
from graphpar.ops.dropout import dropout, dropout_mask, fake_dropout_mask
from graphpar.ops.kernels import KERNELS
from graphpar.ops.sharded import on_group
from graphpar.ops.table import gradient

_SCHEMAS = {
    # A view: compilers never see the op, but the functional collectives and views inside.
    "convert": "convert(Tensor(a) x, str group) -> Tensor(a)",
    "all_reduce": "all_reduce(Tensor x, str dst, str group) -> Tensor",
    "all_gather": (
        "all_gather(Tensor x, int dim, int[] blocks, str dst, str group, int units=0) -> Tensor"
    ),
    "reduce_scatter": (
        "reduce_scatter(Tensor x, int dim, int[] blocks, str group, int units=0) -> Tensor"
    ),
    "all_to_all": (
        "all_to_all(Tensor x, int src_dim, int[] src_blocks, int dst_dim, int[] dst_blocks,"
        " str group, int src_units=0, int dst_units=0) -> Tensor"
    ),
    "shard": "shard(Tensor x, str src, int dim, int[] blocks, str group, int units=0) -> Tensor",
    "pad": "pad(Tensor x, int dim, int[] blocks, str group, int units=0) -> Tensor",
}

_library = torch.library.Library("graphpar", "DEF")


def _direct(name: str, run: Callable[..., Any], *, reads: bool = False) -> Callable[..., Any]:
    """The op, called without torch's dispatcher, which costs 20 us; compilers see the op.

    ``reads``: it takes parameters as they are; compilers see what the rank holds of them.
    """
    op: torch._ops.OpOverload = getattr(torch.ops.graphpar, name).default

    def call(*args: Any) -> Any:
        if torch.compiler.is_compiling():
            return op(*map(_read, args)) if reads else op(*args)
        return run(*args)

    return call


def _read(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return local_all(*value)
    return local(value) if isinstance(value, Tensor) else value


def _below_autograd(kernel: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The kernel without autograd's bookkeeping: its result is no view and may be written to."""
    guard = torch._C._AutoDispatchBelowADInplaceOrView

    def run(x: Tensor, *args: Any) -> Tensor:
        with guard():
            return kernel(x, *args)

    return run


def _define(name: str, schema: str, kernel: Callable[..., Tensor]) -> Callable[..., Tensor]:
    _library.define(schema)
    op: torch._ops.OpOverload = getattr(torch.ops.graphpar, name).default
    run = kernel if name == "convert" else _below_autograd(kernel)

    class Conversion(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, *args: Any) -> Tensor:
            ctx.args = args
            return run(x, *args)

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
            args = tuple(tuple(a) if isinstance(a, list) else a for a in ctx.args)
            back, back_args = gradient(op, args)
            return (back(grads[0], *back_args), *(None for _ in args))

    apply = applied(Conversion)

    def with_autograd(x: Tensor, *args: Any) -> Tensor:
        if x.requires_grad and torch.is_grad_enabled():
            return apply(x, *args)  # type: ignore[no-any-return]
        return run(x, *args)

    _library.impl(name, with_autograd, "Autograd")
    _library.impl(name, kernel, "CompositeExplicitAutograd")
    # Where no autograd key is active (inference mode), compilers look inside the op too.
    op.py_impl(torch._C.DispatchKey.CompositeImplicitAutograd)(kernel)
    torch.library.register_fake(f"graphpar::{name}", kernel, lib=_library)
    return with_autograd


DIRECT: dict[str, Callable[..., Any]] = {}
"""The ops that run by their Python functions, whether autograd is on or off."""

for _name, _schema in _SCHEMAS.items():
    DIRECT[_name] = _direct(_name, _define(_name, _schema, KERNELS[_name]))

_library.define(
    "dropout(Tensor x, float p, bool train, int dim, int[] blocks, str group, int units=0)"
    " -> Tensor"
)
_library.impl("dropout", dropout, "CompositeImplicitAutograd")
_library.define(
    "dropout_mask(Tensor x, float p, int dim, int[] blocks, str group, int units=0) -> Tensor",
    tags=(torch.Tag.nondeterministic_seeded,),
)
_library.impl("dropout_mask", dropout_mask, "CompositeExplicitAutograd")
_library.impl("dropout_mask", torch.library.fallthrough_kernel, "Autograd")  # has no gradient
torch.library.register_fake("graphpar::dropout_mask", fake_dropout_mask, lib=_library)

_SHARDED_SCHEMAS = {
    "embedding": (
        "embedding(Tensor weight, Tensor indices, int padding_idx, bool scale_grad_by_freq,"
        " bool sparse, int dim, int[] blocks, str group, int units=0) -> Tensor"
    ),
    "gather": (
        "gather(Tensor x, int gather_dim, Tensor index, bool sparse_grad, int dim, int[] blocks,"
        " str group, int units=0) -> Tensor"
    ),
    "log_softmax": (
        "log_softmax(Tensor x, int softmax_dim, ScalarType? dtype, int dim, int[] blocks,"
        " str group, int units=0) -> Tensor"
    ),
    "cross_entropy": (
        "cross_entropy(Tensor x, Tensor target, Tensor? weight, int reduction, int ignore_index,"
        " float label_smoothing, int dim, int[] blocks, str group, int units=0) -> Tensor"
    ),
    "nll_loss": (
        "nll_loss(Tensor x, Tensor target, Tensor? weight, int reduction, int ignore_index,"
        " int dim, int[] blocks, str group, int units=0) -> Tensor"
    ),
}


def _compose(name: str) -> Callable[..., Tensor]:
    return lambda *args: on_group(name, args)


for _name, _schema in _SHARDED_SCHEMAS.items():
    _library.define(_schema)
    _library.impl(_name, _compose(_name), "CompositeImplicitAutograd")
    DIRECT[_name] = _direct(_name, _compose(_name))

# --- conversions and products as one op -----------------------------------------------------------

_FUSED: dict[str, tuple[str, Callable[..., Any]]] = {
    "gather_linear": (
        "gather_linear(Tensor x, Tensor[] weights, Tensor?[] biases, int dim, int[] blocks,"
        " str group, int units=0, bool keep=False) -> Tensor[]",
        fused.gather_linear,
    ),
    "convert_linear": (
        "convert_linear(Tensor x, Tensor[] weights, Tensor?[] biases, str group) -> Tensor[]",
        fused.convert_linear,
    ),
    "linear_scatter": (
        "linear_scatter(Tensor x, Tensor weight, Tensor? bias, int dim, int[] blocks, str group,"
        " int units=0) -> Tensor",
        fused.linear_scatter,
    ),
    "convert_many": ("convert_many(Tensor[] xs, str group) -> Tensor[]", fused.convert_many),
}
READ_PARAMETERS = frozenset(_FUSED)
"""The ops that take parameters as they are, but for the operand ``x``."""

for _name, (_schema, _function) in _FUSED.items():
    _library.define(_schema)
    _library.impl(_name, _function, "CompositeImplicitAutograd")
    DIRECT[_name] = _direct(_name, _function, reads=True)
_library.define("copy_after(Tensor x, Tensor anchor) -> Tensor")
_library.impl("copy_after", fused.copy_after, "CompositeExplicitAutograd")
torch.library.register_fake("graphpar::copy_after", fused.copy_after, lib=_library)

# --- dropout with a seed ------------------------------------------------------------------------

_PART = "Tensor x, Tensor seed, float p, int number, int dim=0, int[] blocks=[]"
_library.define(
    "draw_seed(Device device) -> Tensor",
    tags=(torch.Tag.nondeterministic_seeded,),
)
_library.define("call_seed(Tensor seed, int call) -> Tensor")
_library.define(f"dropout_part({_PART}, int rank=0, int ranks=1, int units=0) -> Tensor")
_library.define("dropout_bits(Tensor x, Tensor seed, float p, int number, int stream) -> Tensor")
_library.define("apply_mask(Tensor x, Tensor mask, float scale) -> Tensor")
_library.define(f'seeded_dropout({_PART}, str group="", int units=0) -> Tensor')
_library.define(f'rank_dropout({_PART}, str group="", int units=0) -> Tensor')
_library.impl("seeded_dropout", seeded.seeded_dropout, "CompositeImplicitAutograd")
_library.impl("rank_dropout", seeded.rank_dropout, "CompositeImplicitAutograd")
for _name, _kernel, _fake in (
    ("draw_seed", seeded.draw_seed, seeded.fake_draw_seed),
    ("call_seed", seeded.call_seed, seeded.fake_call_seed),
    ("dropout_part", seeded.dropout_part, seeded.fake_part),
    ("dropout_bits", seeded.dropout_bits, seeded.fake_bits),
    ("apply_mask", seeded.apply_mask, seeded.fake_part),
):
    _library.impl(_name, _kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"graphpar::{_name}", _fake, lib=_library)
for _name in ("draw_seed", "call_seed", "dropout_bits"):  # have no gradient
    _library.impl(_name, torch.library.fallthrough_kernel, "Autograd")
torch.library.register_autograd(
    "graphpar::dropout_part",
    seeded.dropout_part_backward,
    setup_context=seeded.save_seed,
    lib=_library,
)
torch.library.register_autograd(
    "graphpar::apply_mask",
    seeded.apply_mask_backward,
    setup_context=seeded.save_mask,
    lib=_library,
)
