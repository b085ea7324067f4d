"""Opens a language model, in this process or on a server, from a config of `mmqa prompt`."""

from __future__ import annotations

from collections.abc import Mapping

from ml_collections import ConfigDict

from mmqa_jax.core.chunks import launched_shard
from mmqa_jax.core.errors import UserError
from mmqa_jax.core.typed import check_section, spec_of
from mmqa_jax.prompting.backends import Backend, Decoding
from mmqa_jax.prompting.backends.http import OpenAIBackend, ServerConfig
from mmqa_jax.prompting.backends.thinking import read_thinking


def check_prompt_config(config: ConfigDict) -> None:
    """Checks all sections but the engine's, which are checked when an engine is opened."""
    spec = {"decoding": spec_of(Decoding), "server": spec_of(ServerConfig)}
    check_section(config, "", {**spec, "engine": dict, "model": dict, "thinking": str})
    read_thinking(config.thinking, "config key thinking")


def spans_processes(backend: str, config: ConfigDict) -> bool:
    """Whether the engine of `open_backend` has devices of several processes of the launch, as its
    mesh says."""
    if backend != "engine" or launched_shard().count == 1:
        return False
    from mmqa_jax.prompting.backends import local_model

    check_section(config.model, "model", spec_of(local_model.ModelConfig))
    return local_model.spans_processes(config.model.mesh.to_dict())


def open_backend(
    backend: str,
    model: str,
    tokenizer: str | None,
    config: ConfigDict,
    flag: str = "--model",
    adapters: Mapping[str, str] | None = None,
) -> Backend:
    """A language model as a backend.

    Args:
      backend: `engine` or `openai`.
      model: for the engine a path or name (see local_model), for a server its name there.
      tokenizer: for the engine, if the model's folder has none.
      config: as configs/prompt/default.py.
      flag: that named the model, or the config key, for messages.
      adapters: for the engine, see local_model.
    """
    thinking = read_thinking(config.thinking, "config key thinking")
    if backend == "openai":
        if tokenizer is not None:
            named = flag.replace("model", "tokenizer")  # they stand side by side
            raise UserError(f"{named}={tokenizer}: a server has its own; leave it out.")
        return OpenAIBackend(
            model, ServerConfig(**config.server), flag, thinking.on, thinking.effort
        )
    from mmqa_jax.core.hosts import distributed
    from mmqa_jax.decoding.sizes import ENGINE_SPEC
    from mmqa_jax.prompting.backends import local_model

    check_section(config.engine, "engine", ENGINE_SPEC)
    check_section(config.model, "model", spec_of(local_model.ModelConfig))
    distributed.start(join=False)
    return local_model.open_backend(
        model,
        tokenizer=tokenizer,
        config=local_model.ModelConfig(config.model.dtype, config.model.mesh.to_dict()),
        engine=config.engine.to_dict(),
        adapters=adapters,
        flag=flag,
        thinking=thinking,
    )
