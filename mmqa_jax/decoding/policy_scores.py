"""The log-probabilities of a policy's tokens, with gradients and with the bits of its engine.

A policy that learns from what it wrote (GRPO: Shao et al. 2024, DeepSeekMath, equation 3) divides
the probability of a token by the one that it was drawn with. Here both are one number until the
weights change, so that the first ratios are 1 and the KL is 0.
"""

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from mmqa_jax.core.mesh import batch_blocks, platform
from mmqa_jax.decoding import kv_cache
from mmqa_jax.decoding.slot_runner import EngineConfig, page_of
from mmqa_jax.models.llama.network import Llama, for_length


def policy_logprobs(
    model: Llama,
    tokens: jax.Array,
    lengths: jax.Array,
    config: EngineConfig,
    mesh: Mesh | None = None,
) -> jax.Array:
    """The log-probability of every token after those before it; traced, and differentiable.

    The engine's layers compute it over pages of the engine's width, all tokens of a row at once;
    gradients are those of plain attention. On CPUs the bits are the engine's in a program that is
    compiled with `compiler_options.EXACT_ON_CPU`, under `jax.set_mesh` where there is a mesh.

    Args:
      model: as its engine holds it, which takes it over: unstacked, not rounded, without adapters
        and recurrent layers.
      tokens: int32 [B, L], prompts with their answers; B is two or more for each copy of the
        weights, since a single row is summed in another order.
      lengths: int32 [B], of the rows without their padding.
      config, mesh: of the engine.

    Returns:
      float32 [B, L - 1]; behind a row's length anything.
    """
    model = for_length(model, config.length)
    device = jax.local_devices()[0] if mesh is None else mesh.devices.flat[0]
    page, shards = page_of(config, device), 1 if mesh is None else batch_blocks(mesh)
    rows, length = tokens.shape
    pages = -(-length // page)
    of_shard = rows // shards * pages
    dtype = "float32" if platform() == "cpu" else model.config.dtype
    # By their numbers within a shard, whose page 0 is nobody's.
    table = 1 + jnp.arange(rows * pages, dtype=jnp.int32).reshape(rows, pages) % of_shard
    hidden, _ = kv_cache.forward(
        model,
        model.embed(jnp.pad(tokens, ((0, 0), (0, pages * page - length)))),
        kv_cache.empty(model.config, shards * (of_shard + 1), page, dtype, mesh),
        table=table,
        starts=jnp.zeros(rows, jnp.int32),
        ends=lengths,
        mesh=mesh,
    )
    logits = model.logits(hidden[:, : length - 1])
    chosen = jnp.take_along_axis(logits, tokens[:, 1:, None], axis=-1)[..., 0]
    return chosen - jax.nn.logsumexp(logits, axis=-1)
