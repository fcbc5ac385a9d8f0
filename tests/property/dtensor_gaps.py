"""What DTensor allows (torch 2.13) and our rules do not, op by op, with the reason.

``tests/property/test_dtensor.py`` holds these tables to what DTensor answers, so an entry goes as
soon as a rule allows it.
"""

from __future__ import annotations

from collections.abc import Mapping

TORCH = "2.13"

# Whole ops for which DTensor allows what brute force refutes, and what is wrong there.
_SCALAR = "each rank adds the number to its addend"
_WIDTH = "cuts but those of the width are taken for cuts of it, and addends for whole values"
_NO_DIMS = "an empty list of dimensions means all, not none"
_NEGATIVE = "a dimension counted from the end is not seen to be the sharded one"
REFUTED: Mapping[str, str] = {
    "aten.add.Tensor": _SCALAR,
    "aten.sub.Tensor": _SCALAR,
    "aten.conv1d.default": _WIDTH,
    "aten.conv2d.default": _WIDTH,
    "aten.conv3d.default": _WIDTH,
    "aten.convolution.default": _WIDTH,
    "aten.count_nonzero.dim_IntList": _NO_DIMS,
    "aten.sum.dim_IntList": _NO_DIMS,
    "aten.norm.ScalarOpt_dim": _NO_DIMS,
    "aten.logsumexp.default": "a dimension that is kept is not counted in the result",
    "aten.cumprod.default": _NEGATIVE,
    "aten.cumsum.default": _NEGATIVE,
    "aten.logcumsumexp.default": _NEGATIVE,
    "aten.cross_entropy_loss.default": "a mean of each rank's tokens is taken for an addend",
    "aten.embedding.default": "gradients are scaled by how often a rank's ids occur, not all",
    "aten.index.Tensor": "indices apart: the index's dimensions come first, not in place",
    "aten.one_hot.default": "a rank's largest id is taken for the largest of all",
}

NOT_TAKEN = {
    *(f"aten.{op}" for op in ("_cdist_forward.default", "im2col.default", "unfold.default")),
    *(f"aten.{op}" for op in ("scatter_reduce.two", "searchsorted.Tensor")),
    "aten._embedding_bag.default",
    "aten._grouped_mm.default",  # its shapes are derived for bfloat16 only
}
"""What DTensor does not run even on whole operands."""

TYPE = "our types have no Partial but of sums"
REWRITTEN = "normalize writes it as another op, which has the placement"
BOOLEAN = "addends of booleans or of counts, which a sum of types does not keep"
ADDEND = "the addend would have to be Partial too, and no conversion makes it that"
WEIGHTS = "linear in weights that are never addends in a model"
LIKE = "only the shape is read: the shards of an addend serve as well"
EMPTY = "a tensor without elements makes the op opaque"
TABLES = "what is looked up in is small, and stays whole"
LETTERS = "right for one letter; with the other letters cut too, products would be missing"
SCALAR = "no axis to look up along: opaque"
DATA = "right for these values only"

# op → form → reason.
_TYPED = {
    **dict.fromkeys(("P R -> P", "P P -> P", "P S -> P"), REWRITTEN),
    **dict.fromkeys(("R P -> R", "R S -> R"), REWRITTEN),
    **dict.fromkeys(("S P -> S", "S R -> S", "S S -> S"), REWRITTEN),
}
_PRODUCT, _MAX, _MIN = ({f"S -> P({kind})": TYPE} for kind in ("product", "max", "min"))
_CREATED = {"P -> R": REWRITTEN, "S -> R": REWRITTEN}
_ANY = {"S -> P": BOOLEAN}
GAPS: Mapping[str, Mapping[str, str]] = {
    "aten.addmm.default": {"P S S -> P": ADDEND},
    "aten.addmv.default": {"P S S -> P": ADDEND},
    "aten.baddbmm.default": {"P S S -> P": ADDEND},
    "aten.linear.default": {"S S P -> P": ADDEND},
    "aten.all.default": _PRODUCT,
    "aten.all.dim": _PRODUCT,
    "aten.prod.default": _PRODUCT,
    "aten.prod.dim_int": _PRODUCT,
    "aten.amax.default": _MAX,
    "aten.max.default": _MAX,
    "aten.amin.default": _MIN,
    "aten.min.default": _MIN,
    "aten.aminmax.default": {"S -> P(min) P(max)": TYPE},
    "aten.linalg_vector_norm.default": {"S -> P(norm)": TYPE, **_MAX},
    "aten.norm.Scalar": {"S -> P(norm)": TYPE},
    "aten.norm.ScalarOpt_dim": {"S -> P(norm)": TYPE},
    "aten.any.default": _ANY,
    "aten.any.dim": _ANY,
    "aten.any.dims": _ANY,
    "aten.bucketize.Tensor": {"R S -> P": TABLES},
    "aten.isin.Tensor_Tensor": {"R S -> P": TABLES},
    "aten.binary_cross_entropy.default": {"R R P -> P": WEIGHTS},
    "aten.binary_cross_entropy_with_logits.default": {"R R P -> P": WEIGHTS},
    "aten.rms_norm.default": {"R P -> P": WEIGHTS},
    "aten._weight_norm_interface.default": {"R P -> P R": WEIGHTS},
    "aten.special_xlog1py.default": {"P R -> P": WEIGHTS},
    "aten.cat.default": {"P P P -> P": EMPTY},
    "aten.narrow.default": {"P -> P": EMPTY, "S -> S": EMPTY},
    "aten.slice.Tensor": {"P -> P": EMPTY},
    "aten.split.sizes": {"P -> P P P": EMPTY, "S -> S S S": EMPTY},
    "aten.split_with_sizes.default": {"P -> P P P": EMPTY, "S -> S S S": EMPTY},
    "aten.einsum.default": dict.fromkeys(
        ("R S -> P", "R S S -> P", "S R -> P", "S R R -> P"), LETTERS
    ),
    "aten.embedding.default": {"R S -> S": DATA},
    "aten.one_hot.default": {"S -> S": DATA},
    "aten.nansum.default": {"P -> P": DATA},
    "aten.full_like.default": {"P -> R": LIKE},
    "aten.ones_like.default": {"P -> R": LIKE},
    "aten.zeros_like.default": {"P -> R": LIKE},
    "aten.new_full.default": _CREATED,
    "aten.new_ones.default": _CREATED,
    "aten.new_zeros.default": _CREATED,
    "aten.squeeze.default": {"S -> S": REWRITTEN},
    "aten.squeeze.dim": {"S -> S": REWRITTEN},
    "aten.to.other": _TYPED,
    "aten.type_as.default": _TYPED,
    "aten.index_add.default": {"P R P -> P": SCALAR},
    "aten.index_select.default": {"P R -> P": SCALAR},
}

# Ops that DTensor has a strategy for and that are opaque here.
OPAQUE: Mapping[str, tuple[str, ...]] = {
    "below the level of export: layers and losses are traced as one op each": (
        "aten._batch_norm_with_update_functional.default",
        "aten._fused_rms_norm.default",
        "aten._native_batch_norm_legit.no_stats",
        "aten._native_batch_norm_legit_no_training.default",
        "aten._scaled_dot_product_cudnn_attention.default",
        "aten._scaled_dot_product_efficient_attention.default",
        "aten._scaled_dot_product_flash_attention.default",
        "aten.native_batch_norm.default",
        "aten.native_dropout.default",
        "aten.native_layer_norm.default",
        "aten.nll_loss2d_forward.default",
        "aten.nll_loss_forward.default",
    ),
    "copies and views that only functionalisation or a compiler makes": (
        "aten.expand_copy.default",
        "aten.split_with_sizes_copy.default",
        "aten.view_copy.default",
    ),
    "random: drawn whole on every rank": (
        "aten.bernoulli.default",
        "aten.fractional_max_pool2d.default",
        "aten.fractional_max_pool3d.default",
        "aten.multinomial.default",
        "aten.normal_functional.default",
        "aten.rand_like.default",
        "aten.randint_like.default",
        "aten.randint_like.low_dtype",
        "aten.randn_like.default",
        "aten.rrelu_with_noise_functional.default",
    ),
    "linear algebra of whole matrices, of no weight in a layer": (
        "aten._linalg_check_errors.default",
        "aten._linalg_det.default",
        "aten._linalg_eigh.default",
        "aten._linalg_slogdet.default",
        "aten._linalg_solve_ex.default",
        "aten._linalg_svd.default",
        "aten.cholesky.default",
        "aten.cholesky_inverse.default",
        "aten.cholesky_solve.default",
        "aten.geqrf.default",
        "aten.linalg__powsum.default",
        "aten.linalg_cholesky_ex.default",
        "aten.linalg_cross.default",
        "aten.linalg_eig.default",
        "aten.linalg_householder_product.default",
        "aten.linalg_inv_ex.default",
        "aten.linalg_ldl_factor_ex.default",
        "aten.linalg_ldl_solve.default",
        "aten.linalg_lu.default",
        "aten.linalg_lu_factor_ex.default",
        "aten.linalg_lu_solve.default",
        "aten.linalg_matrix_exp.default",
        "aten.linalg_pinv.atol_rtol_tensor",
        "aten.linalg_qr.default",
        "aten.linalg_solve_triangular.default",
        "aten.lu_unpack.default",
        "aten.ormqr.default",
        "aten.triangular_solve.default",
    ),
    "answers with a number or a truth of Python, which export fixes": (
        "aten._local_scalar_dense.default",
        "aten.equal.default",
        "aten.is_same_size.default",
    ),
    "inference only: no gradient": (
        "aten._scaled_mm.default",
        "aten._upsample_lanczos2d_aa.default",
    ),
    "no model that we know uses it in a layer": (
        "aten.diag.default",
        "aten.diagonal_scatter.default",
        "aten.index_reduce.default",
        "aten.max_unpool2d.default",
        "aten.max_unpool3d.default",
        "aten.view.dtype",
    ),
}
