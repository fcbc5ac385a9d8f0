"""Rules of neural-network ops that are not plain formulas."""

from __future__ import annotations

from graphpar.axes import fresh, unify
from graphpar.passes.rules.call import Call, OpRule, Rule, tie
from graphpar.passes.rules.einsum import einsum, from_equation, new_axis, whole_terms


def linear(call: Call) -> OpRule:
    return einsum(call, "... k, n k, +n -> ... n", [call["input"], call["weight"], call["bias"]])


def added_product(formula: str) -> Rule:
    """A product of two operands with an addend that broadcasts to it (``addmm``); ``beta`` and
    ``alpha`` scale them on shards as on the whole."""

    def rule(call: Call) -> OpRule:
        letters = formula.split("->")[1].split()
        bias = "+" + " ".join(letters[len(letters) - len(call.x.shape) :])
        return einsum(call, f"{bias}, {formula}", call.operands)

    return rule


def grouped_mm(call: Call) -> OpRule | None:
    """Rows sorted by group, each group times its own matrix: rows and groups are whole. The kernel
    wants rows of multiples of 16 bytes."""
    x, weight, ends = call.operands[0], call.operands[1], call.get("offs")
    if ends is None or call.get("bias") is not None or len(x.shape) != 2 or len(weight.shape) != 3:
        return None
    rule = einsum(call, "[s] k, [e] k n, [e] -> s n", [x, weight, ends])
    rule.partial = [{x.index}, {weight.index}]
    rule.multiple = 16 // x.spec.dtype.itemsize
    return rule


def recurrence(call: Call) -> OpRule:
    """``sparse_rnn``: the batch may be cut, time and units mix."""
    names = ("gates", "weight", "bias", "projection", "h", "c")
    formula = "[t] b [g], [g] [p], [g], [p] [h], b [p], b [h] -> t b p, b p, " + (
        "b p" if call["c"] is None else "b h"
    )
    return einsum(call, formula, [call[name] for name in names], linear=False)


def distances(call: Call) -> OpRule:
    """``_cdist_forward``: all pairs of rows."""
    formula = "... p [d], ... r [d] -> ... p r"
    return einsum(call, formula, [call["x1"], call["x2"]], linear=False)


def matmul(call: Call) -> OpRule:
    left, right = (len(o.shape) for o in call.operands)
    x = "k" if left == 1 else "... m k" if left > 2 or right > 2 else "m k"
    y = "k" if right == 1 else "... k n" if left > 2 or right > 2 else "k n"
    if left == 1:
        out = "" if right == 1 else y.replace("k ", "")
    else:
        out = x.replace(" k", "") + ("" if right == 1 else " n")
    return einsum(call, f"{x}, {y} -> {out}", call.operands)


def torch_einsum(call: Call) -> OpRule | None:
    """Two letters that no tensor has together could be cut at once, which would pair each rank's
    part of one with its part of the other only; so a contracted one of them is whole."""
    tensors = call["tensors"]
    formula = from_equation(call["equation"], [len(x.shape) for x in tensors])
    if formula is None:
        return None
    rule = einsum(call, formula, tensors)
    left, out = formula.split("->")
    spelled = [
        [(letter, dim) for letter, dim in zip(term.split(), x.dims, strict=True) if dim]
        for term, x in zip(left.split(","), tensors, strict=True)
    ]
    terms = [{letter for letter, _ in term} for term in spelled]
    used = set().union(*terms)
    together = [used.intersection(out.split()), *terms]
    for letter, dim in (pair for term in spelled for pair in term):
        met = set().union(*(letters for letters in together if letter in letters))
        rule.whole += dim if letter not in together[0] and met != used else []
    return rule


def attention(call: Call) -> OpRule | None:
    """Scaled dot-product attention: batch and heads pass, the rest of what is mixed is whole.

    With grouped queries (``enable_gqa``) the query heads are (key heads, group).
    """
    q, k, v, mask = call["query"], call["key"], call["value"], call["attn_mask"]
    if len(q.shape) < 3 or len({len(o.shape) for o in (q, k, v)}) > 1:
        return None
    if mask is not None and len(mask.shape) < 2:
        return None
    causal = "[s]" if call["is_causal"] else "s"
    if not call["enable_gqa"] or q.shape[-3] == k.shape[-3]:
        formula = f"... {causal} [d], ... [t] [d], ... [t] e, ... {causal} [t] -> ... {causal} e"
        rule = einsum(call, formula, [q, k, v, mask], linear=False)
        rule.partial = [{v.index}]
        return rule
    if k.shape[-3] != v.shape[-3]:
        return None
    rule = einsum(
        call,
        f"... q {causal} [d], ... h [t] [d], ... h [t] e -> ... q {causal} e",
        [q, k, v],
        linear=False,
    )
    group = new_axis(q.shape[-3] // k.shape[-3])
    rule.whole += unify(q.dims[-3], [*k.dims[-3], *group])
    if mask is not None:
        columns = [
            [(size, dim), (q_size, q_dim)]
            for size, dim, q_size, q_dim in zip(
                mask.shape[-2::-1],
                mask.dims[-2::-1],
                q.shape[-2::-1],
                q.dims[-2::-1],
                strict=False,
            )
            if size == q_size
        ]
        _, stuck = tie(columns)
        rule.whole += [*stuck, *mask.dims[-1], *unify(mask.dims[-1], k.dims[-2])]
    # A query head belongs to one key head: neither is contracted where the other is cut.
    rule.contracted, rule.partial = [], [{v.index}]
    return rule


def layer_norm(call: Call) -> OpRule:
    """``layer_norm`` and ``rms_norm``: the normalised dimensions are whole."""
    count = len(call["normalized_shape"])
    last = call.x.dims[len(call.x.dims) - count :]
    whole = whole_terms(last)
    for name in ("weight", "bias"):
        if call.get(name) is not None:
            for mine, other in zip(last, call[name].dims, strict=True):
                whole += unify(mine, other)
    return OpRule([call.x.dims], whole=whole)


def weight_norm(call: Call) -> OpRule:
    """``_weight_norm_interface``: norms are over all dimensions but ``dim``."""
    v, g, dim = call["v"], call["g"], call.dim()
    whole = whole_terms([d for i, d in enumerate(v.dims) if i != dim])
    whole += unify(v.dims[dim], g.dims[dim])
    return OpRule([v.dims, g.dims], whole=whole)


def convolution(call: Call) -> OpRule:
    """Batch and output channels pass; input channels are contracted unless there is a bias.

    The channels are (group, channel of the group) on both sides.
    """
    x, weight, bias, groups = call["input"], call["weight"], call["bias"], call["groups"]
    spatial = len(weight.shape) - 2
    batch, channels = x.dims[: -spatial - 1], x.dims[-spatial - 1]
    out = fresh(call.results[0].shape[-spatial:])
    group, inner = new_axis(groups), weight.dims[1]
    whole = whole_terms([*x.dims[-spatial:], *out, *weight.dims[2:]])
    whole += unify(channels, [*group, *inner])
    whole += unify(weight.dims[0], [*group, *new_axis(weight.shape[0] // groups)])
    if bias is not None:
        whole += [*unify(weight.dims[0], bias.dims[0]), *inner]
    return OpRule(
        [[*batch, weight.dims[0], *out]],
        whole=whole,
        contracted=list(inner),
        partial=[{x.index}, {weight.index}] if bias is None else [],
        local={"groups": lambda inputs, _: inputs[0][-spatial - 1] // inputs[1][1]},
    )


def batch_norm(call: Call) -> OpRule:
    """In training, statistics are over all dimensions but the channels: those are whole."""
    channels = call.x.dims[1]
    whole = whole_terms([d for i, d in enumerate(call.x.dims) if i != 1])
    if not call["training"]:
        whole = []
    for operand in call.operands[1:]:
        whole += unify(channels, operand.dims[0])
    results = [call.x.dims if len(r.shape) > 1 else [channels] for r in call.results]
    return OpRule(results, whole=whole)


def cross_entropy(call: Call) -> OpRule | None:
    """Shards of the classes exchange what they reduce; tokens pass or are summed, but a mean over
    them needs all of them. Class weights are cut with the classes."""
    if call["self"].shape == call["target"].shape:
        return _soft_targets(call)
    rule = _token_losses(call)
    if rule is not None:
        classes = call["self"].dims[rule.own[0]]
        rule.reduced = list(classes)
        if call.get("weight") is not None:
            rule.whole += unify(classes, call["weight"].dims[0])
    return rule


def nll_loss(call: Call) -> OpRule | None:
    """A lookup along the classes: the loss of the targets that a rank holds is an addend. Class
    weights are whole, so that each rank can divide a mean by those of all targets."""
    rule = _token_losses(call)
    if rule is not None:
        rule.contracted += call["self"].dims[rule.own[0]]
        if call.get("weight") is not None:
            rule.whole += call["weight"].dims[0]
    return rule


def _soft_targets(call: Call) -> OpRule:
    """Targets that are probabilities: the classes are whole, a mean is over the tokens."""
    x, target = call["self"], call["target"]
    classes = min(len(x.shape) - 1, 1)
    tokens = [dim for d, dim in enumerate(x.dims) if d != classes]
    whole = [t for a, b in zip(x.dims, target.dims, strict=True) for t in unify(a, b)]
    whole += x.dims[classes]
    if call.get("weight") is not None:
        whole += call["weight"].dims[0]
    rule = OpRule([tokens], whole=whole, partial=[{target.index}])
    if call["reduction"]:
        rule.results, rule.contracted = [[]], whole_terms(tokens)
        rule.average = call["reduction"] == 1
    return rule


def _token_losses(call: Call) -> OpRule | None:
    """Losses of class indices, one per token, by ``reduction`` (0 none, 1 mean, 2 sum); ``None``
    for targets that are probabilities."""
    x, target = call["self"], call["target"]
    if len(x.shape) != len(target.shape) + 1:
        return None
    classes = min(len(x.shape) - 1, 1)
    tokens = [dim for d, dim in enumerate(x.dims) if d != classes]
    whole = [t for a, b in zip(tokens, target.dims, strict=True) for t in unify(a, b)]
    if call["reduction"] == 0:
        return OpRule([tokens], whole=whole, own=[classes])
    if call["reduction"] == 1:
        return OpRule([[]], whole=[*whole, *whole_terms(tokens)], own=[classes])
    return OpRule([[]], whole=whole, contracted=whole_terms(tokens), own=[classes])
