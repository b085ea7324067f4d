"""A port by itself, in JAX code of one's own.

model = mmqa.load_model("Qwen/Qwen3-0.6B", download=True)
ids, mask = model.tokens(["The capital of Peru is Lima."])
logits = model.forward(ids, mask)  # [1, L, V]
loss, gradients = nnx.value_and_grad(model.loss_of)(model.network, ids, mask)
print(model.generate("The capital of Peru is", max_new_tokens=8))
vectors = mmqa.load_model("minilm").encode(["The capital of Peru is Lima."])
shardings = model.shardings(jax.sharding.AbstractMesh((2, 4), ("fsdp", "tensor")))
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Bool, Float32, Int32

from mmqa_jax.core.errors import UserError, check_several
from mmqa_jax.core.hosts import distributed
from mmqa_jax.core.mesh import platform, state_shardings
from mmqa_jax.data.corpus import Corpus, PictureOf
from mmqa_jax.data.pictures.decode import read_picture_file
from mmqa_jax.models.encoders.text_encoders import load_text_encoder, published_folder
from mmqa_jax.prompting.backends import (
    Backend,
    Chat,
    Completion,
    Decoding,
    Message,
    Picture,
)
from mmqa_jax.prompting.backends.local_model import ModelConfig, open_backend
from mmqa_jax.prompting.text_tokenizer import TextTokenizer, open_text_tokenizer
from mmqa_jax.weights.bundled import LANGUAGE_MODELS, minilm_path
from mmqa_jax.weights.config_json import replace_fields
from mmqa_jax.weights.folder import load_converted, read_record
from mmqa_jax.weights.hub import download_model, find_model, is_hub_name
from mmqa_jax.weights.published import load_published
from mmqa_jax.weights.record import is_weights_folder
from mmqa_jax.weights.registry import architecture, check_declared, model_of

_MINILM = "minilm"


@dataclasses.dataclass(frozen=True)
class LoadedModel:
    """A model of any family that is ported. Made by `load_model`.

    Attributes:
      name: by which it was loaded.
      path: its folder or file.
      family: of `mmqa models`: llama, qwen_vl, llava, bert...
      network: the nnx.Module; what its call takes, its docstring says.
    """

    name: str
    path: Path
    family: str
    network: nnx.Module

    @property
    def config(self) -> Any:
        """The dataclass that the network is built from."""
        return self.network.config

    @functools.cached_property
    def tokenizer(self) -> TextTokenizer:
        """The tokenizer of a language model; UserError for another one."""
        self._check_writes("tokens")
        return open_text_tokenizer(self.path)

    def tokens(
        self, texts: Sequence[str], length: int | None = None
    ) -> tuple[Int32[np.ndarray, "B L"], Bool[np.ndarray, "B L"]]:
        """Token ids of texts, padded with zeros on the right, and which are real.

        Args:
          length: L; longer texts are cut; None: that of the longest.
        """
        check_several(texts, "LoadedModel.tokens")
        rows = [self.tokenizer.encode(text)[:length] for text in texts]
        width = length or max(map(len, rows))
        ids, mask = np.zeros((len(rows), width), np.int32), np.zeros((len(rows), width), bool)
        for number, row in enumerate(rows):
            ids[number, : len(row)], mask[number, : len(row)] = row, True
        return ids, mask

    def forward(
        self, ids: Int32[np.ndarray, "B L"], mask: Bool[np.ndarray, "B L"] | None = None
    ) -> Float32[jax.Array, "B L V"]:
        """Logits of the next token at every position of texts."""
        self._check_writes("forward")
        return _logits(self.network, ids, mask)

    def loss(self, ids: Int32[np.ndarray, "B L"], mask: Bool[np.ndarray, "B L"]) -> jax.Array:
        """Mean cross-entropy of the next token over the real ones."""
        self._check_writes("loss")
        return _loss(self.network, ids, mask)

    @staticmethod
    def loss_of(network: nnx.Module, ids: jax.Array, mask: jax.Array) -> jax.Array:
        """`loss` as a function of the network, for `nnx.value_and_grad`."""
        return _mean_loss(network, ids, mask)

    def generate(
        self,
        prompt: str,
        pictures: Sequence[PictureOf] = (),
        *,
        max_new_tokens: int = 64,
        temperature: float = 0.0,
        seed: int = 0,
    ) -> str:
        """The model's answer to a prompt, in its chat template, or its continuation without one.

        The first call opens the engine of `mmqa prompt`, which reads weights of its own.

        Args:
          pictures: paths or encoded bytes, shown before the text to a model that sees.
        """
        self._check_writes("generate")
        encoded = (x if isinstance(x, bytes) else read_picture_file(x) for x in pictures)
        content = (*(Picture(data) for data in encoded), prompt)
        decoding = Decoding(max_new_tokens=max_new_tokens, temperature=temperature, seed=seed)
        engine = self._engine
        query: Chat | Completion = Chat(0, (Message("user", content),), decoding)
        if not engine.takes_messages:
            query = Completion(0, prompt, decoding, tuple(content[:-1]))
        engine.check(query)
        (result,) = engine.answer([query])
        return result.candidates[0].text

    @functools.cached_property
    def _engine(self) -> Backend:
        return open_backend(self.path, config=ModelConfig(dtype=self._dtype), flag="load_model")

    @property
    def _dtype(self) -> str:
        decoder = getattr(self.config, "llama", self.config)
        return str(decoder.dtype)

    def encode(self, texts: Sequence[str]) -> Float32[np.ndarray, "n D"]:
        """Unit vectors of texts, of an encoder, by its published pooling and prompts."""
        check_several(texts, "LoadedModel.encode")
        return self._embedder.embed_passages(list(texts))

    @functools.cached_property
    def _embedder(self) -> Any:
        from mmqa_jax.tasks.library import open_text_embedder

        return open_text_embedder(_MINILM if self.name == _MINILM else str(self.path), Corpus([]))[
            0
        ]

    def shardings(self, mesh: Mesh) -> Any:
        """The NamedSharding of every parameter over a mesh with axes of `data`, `fsdp`, `tensor`,
        as a tree like `nnx.state(network)`."""
        return state_shardings(nnx.state(self.network), mesh)

    def _check_writes(self, what: str) -> None:
        if architecture(self.family, trained=True).writes != "decoder":
            raise UserError(
                f"LoadedModel.{what}: {self.name} is a {self.family}, which is no decoder; call "
                "its `network`, or `encode` where it is an encoder."
            )


def load_model(
    model: str | os.PathLike,
    *,
    mesh: Mesh | None = None,
    dtype: str = "auto",
    download: bool = False,
) -> LoadedModel:
    """Loads the published or trained weights of a model that is ported (`mmqa models`).

    Args:
      model: `smollm2`, `minilm`, a folder of transformers or of `mmqa convert`, a training run, a
        GGUF file, or ORG/NAME in the Hugging Face cache.
      mesh: over which parameters are sharded, each device reading its own; None: one device.
      dtype: of parameters and arithmetic: float32, bfloat16, or auto: float32 on a CPU, bfloat16
        elsewhere.
      download: fetch ORG/NAME if it is not in the cache.
    """
    if dtype not in ("auto", "float32", "bfloat16"):
        raise UserError(f"load_model: dtype={dtype!r} is not auto, float32 or bfloat16.")
    name = str(model)
    if download:
        download_model(name, "load_model: model")
    path = _path_of(name)
    distributed.start(join=False)
    family = model_of(path)
    if family is None:
        check_declared(path)
        raise UserError(f"load_model: {path} does not say what model it holds; see `mmqa models`.")
    if dtype == "auto":
        dtype = "float32" if platform() == "cpu" else "bfloat16"
    return LoadedModel(name, path, family, _network(path, family, dtype, mesh))


def _path_of(name: str) -> Path:
    if name == _MINILM:
        return minilm_path()
    if name in LANGUAGE_MODELS:
        return LANGUAGE_MODELS[name]()
    if is_hub_name(name):
        return find_model(name, "load_model: model", "pass download=True")
    if not Path(name).exists():
        raise UserError(
            f"load_model: {name}: no such file or folder, nor ORG/NAME of a model; check it."
        )
    return Path(name)


def _network(path: Path, family: str, dtype: str, mesh: Mesh | None) -> nnx.Module:
    entry = architecture(family, trained=True)
    if is_weights_folder(path):
        config = read_record(path).config
        if entry.writes:
            config = replace_fields(config, dtype=dtype)
        return load_converted(path, mesh=mesh, param_dtype=dtype, config=config)
    if entry.writes:
        return load_published(family, path, mesh=mesh, param_dtype=dtype, dtype=dtype)
    if (folder := published_folder(path)) is not None and family in ("bert", "encoders"):
        return load_text_encoder(folder, mesh)
    return load_published(family, path, mesh=mesh)


def _text_logits(network: Any, ids: jax.Array, mask: jax.Array | None) -> jax.Array:
    """[B, L, V] of texts; a model that sees has its decoder as `llama`."""
    return getattr(network, "llama", network)(ids, mask)


def _mean_loss(network: Any, ids: jax.Array, mask: jax.Array) -> jax.Array:
    log_probs = jax.nn.log_softmax(_text_logits(network, ids, mask)[:, :-1])
    of_next = jnp.take_along_axis(log_probs, ids[:, 1:, None], axis=-1)[..., 0]  # [B, L - 1]
    real = mask[:, 1:] & mask[:, :-1]
    return -jnp.sum(of_next * real) / jnp.maximum(real.sum(), 1)


_logits = nnx.jit(_text_logits)
_loss = nnx.jit(_mean_loss)
