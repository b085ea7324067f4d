"""Options of XLA's compilers for programs of a mesh, where the defaults are not wanted."""

from __future__ import annotations

from jax.sharding import Mesh

# Chips with SparseCores can reduce gradients on them while the TensorCores go on with the backward
# pass: each layer's reduction then starts beside the products of the layer before it. Without these
# a chip waits for each layer's reduction. TPU v5e has no such cores.
_REDUCE_ON_SPARSE_CORES = {
    "xla_tpu_enable_sparse_core_collective_offload_all_reduce": True,
    "xla_tpu_enable_ici_ar_pipelining": True,
}
_DATA_PARALLEL = {  # by jax's device_kind
    "TPU v5": _REDUCE_ON_SPARSE_CORES,  # v5p
    "TPU v5p": _REDUCE_ON_SPARSE_CORES,
    "TPU v6 lite": _REDUCE_ON_SPARSE_CORES,
    "TPU v6e": _REDUCE_ON_SPARSE_CORES,
}
# XLA for CUDA (jax 0.10.2) fuses a softmax over one query, as in VLP's last layer, with the
# gradient behind it, and then refuses the bfloat16 sum in it ("tt.splat op requires the same
# element type"). Without the fusion a training step of VLP's answers moves 7 % more bytes.
_GPU = {"xla_disable_hlo_passes": "triton-softmax-rewriter"}


def training_options(mesh: Mesh) -> dict[str, bool | str]:
    """`compiler_options` of `jax.jit` for a training step on a mesh, present or not.

    They concern gradients that are reduced over the axis "data"; with "fsdp" alone the compiler
    splits gathers and reductions into steps that run beside products by itself.
    """
    if mesh.devices.flat[0].platform == "gpu":
        return _GPU
    if mesh.shape.get("data", 1) == 1:
        return {}
    return _DATA_PARALLEL.get(mesh.devices.flat[0].device_kind, {})


# XLA for TPUs by itself sends a product's operand around a ring, part by part, beside the product
# (a windowed einsum). It then copies matrices out of their stack, and all of its parts take 1.4 to
# 2 times as long as the whole by its own estimate: gathered before the product it is less.
_PROMPTS = {"xla_jf_spmd_threshold_for_windowed_einsum_mib": "1000000"}


def prompt_options(mesh: Mesh | None) -> dict[str, bool | str]:
    """`compiler_options` of `jax.jit` for an engine's chunks of prompts, see `training_options`."""
    on_tpus = mesh is not None and mesh.devices.flat[0].platform == "tpu"
    return _PROMPTS if on_tpus and mesh.shape["tensor"] > 1 else {}


# A row's bits then do not depend on how many rows are beside it: XLA on a CPU else takes sums, and
# what follows a product, from YNNPACK where arrays are large, which rounds in another order.
# YNNPACK's products alone have equal rows, of two rows and more, but for those of bfloat16 on
# processors with AMX. Roundings to bfloat16 are never left out, which else depends on what is
# compiled together.
EXACT_ON_CPU: dict[str, bool | str] = {
    "xla_cpu_experimental_ynn_fusion_type": "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT",
    "xla_allow_excess_precision": False,
}
