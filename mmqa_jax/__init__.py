"""mmqa_jax: multimodal, multi-hop question answering in JAX."""

__version__ = "0.1.0"
