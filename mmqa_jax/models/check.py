"""`mmqa convert --check`: a model beside transformers' on the same weights, layer by layer.

Both sides get the same input in float32: 520 tokens, or as many as the model takes, and a picture
of noise where it sees. Where they differ by more than is usual, transformers in float64 says what
of that is rounding: states of some ten thousand, as many a language model has, leave it in logits.
"""

import functools
import importlib.util
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.files import read_json
from mmqa_jax.models.common.comparison import Check, Outputs
from mmqa_jax.models.encoders import text_encoders
from mmqa_jax.weights.convert import convert
from mmqa_jax.weights.folder import load_converted, read_record
from mmqa_jax.weights.published import load_published
from mmqa_jax.weights.record import is_weights_folder
from mmqa_jax.weights.registry import architecture, architectures, model_of, names

ABSOLUTE, RELATIVE = 1e-4, 1e-5
ROUNDINGS = 4
BOUND = (
    f"{ABSOLUTE:g}, or {RELATIVE:g} of the largest value so far where it exceeds 10; beyond it, "
    f"from transformers in float64 {ROUNDINGS} times as much as transformers in float32 deviates"
)


class Compared(NamedTuple):
    """One layer or output of both sides."""

    name: str  # `layer 3`, `text layer 1`, `logits`
    deviation: float  # the largest difference of a value
    # The largest absolute value of transformers'; of a layer up to there, since what it adds to
    # carries the rounding of the layers before it.
    size: float
    # How far transformers in float32 is from itself in float64, if that is what was compared with.
    rounding: float = 0.0

    @property
    def allowed(self) -> float:
        """The bound: see BOUND."""
        return max(ABSOLUTE, RELATIVE * self.size, ROUNDINGS * self.rounding)

    @property
    def passed(self) -> bool:
        """Whether it is within the bound; NaN is not."""
        return self.deviation <= self.allowed


def deviation(got: Any, want: Any) -> tuple[float, float]:
    """The largest difference, and the largest absolute value of `want`, in float64."""
    got, want = (np.asarray(x, dtype=np.float64) for x in (got, want))
    return np.abs(got - want).max(initial=0).item(), np.abs(want).max(initial=0).item()


def compare(ours: Outputs, theirs: Outputs) -> list[Compared]:
    """Both sides, name by name.

    Raises:
      ValueError: they have not the same layers and outputs.
    """
    got, want = ours.named(), theirs.named()
    shapes, wanted = ({name: x.shape for name, x in side.items()} for side in (got, want))
    if shapes != wanted:
        raise ValueError(f"ours gives {shapes}, transformers {wanted}")
    rows: list[Compared] = []
    for name in want:
        row = Compared(name, *deviation(got[name], want[name]))
        carries = name not in theirs.ends and not name.endswith("embeddings")
        rows.append(row._replace(size=max(row.size, rows[-1].size)) if carries else row)
    return rows


def check(model: str | None, source: Path, converted: Path | None = None) -> list[Compared]:
    """Compares a checkpoint as it is read here with transformers' reading of it.

    Args:
      model: of a layout that transformers does not read, the registry's name; else it is found.
      source: a folder of transformers (an encoder of texts or a cross-encoder too), a converted
        folder, or any other checkpoint that `mmqa convert` reads. What transformers does not read
        is first exported for it.
      converted: what `mmqa convert` made of `source`, in place of reading it.
    """
    for package in ("torch", "transformers"):
        if importlib.util.find_spec(package) is None:
            raise UserError(f"--check: {package} is not installed; run `pip install {package}`.")
    if not source.exists():
        raise UserError(f"--source={source}: no such file or folder; name a checkpoint.")
    name = _name_of(source, model)
    kind = _check_of(name)
    if kind is None:
        known = [name for name in architectures() if _check_of(name)]
        raise UserError(
            f"--check: transformers does not have the model {name}, so there is nothing to compare "
            f"with; tests/equivalence/ compares it. Known are {', '.join((*known, *_ENCODERS))}."
        )
    with tempfile.TemporaryDirectory() as folder, jax.default_matmul_precision("highest"):
        published = source
        if not _is_published(source):
            published = Path(folder) / "hf"
            convert(name, source, published, export="hf", dtype="float32")
        ours = _load(name, source, converted)
        inputs = kind.inputs(ours.config)
        graphdef, state = nnx.split(ours)
        read = functools.partial(outputs, published, kind, kind.peer_inputs(inputs))
        run = jax.jit(lambda state, inputs: tuple(kind.run(nnx.merge(graphdef, state), inputs)))
        made, theirs = Outputs(*run(state, inputs)), Outputs(*read())
        rows = compare(made, theirs)
        if all(row.passed for row in rows):
            return rows
        exact = Outputs(*read(dtype="float64"))
        return [
            row._replace(rounding=publishers.deviation)
            for row, publishers in zip(compare(made, exact), compare(theirs, exact), strict=True)
        ]


# Encoders of texts and cross-encoders, of any family that transformers has.
_ENCODERS = {"encoder": text_encoders.CHECK, "reranker": text_encoders.RERANKER_CHECK}


def _check_of(name: str) -> Check | None:
    return _ENCODERS.get(name) or architecture(name, trained=True).part("check")


def _name_of(source: Path, model: str | None) -> str:
    """The name of the architecture at a path; `encoder` or `reranker`."""
    if is_weights_folder(source):
        name = read_record(source).architecture.name
    elif _is_published(source):
        file, known = source / text_encoders.CONFIG, model_of(source)
        kind = read_json(file).get("model_type")
        if text_encoders.is_classifier(source):
            name = "reranker"
        elif kind in text_encoders.FAMILIES:
            name = "llama" if known == "llama" else "encoder"
        elif known != "llama" and known and _check_of(known):  # a LLaMA has a tower: it is left out
            name = known
        else:
            raise UserError(
                f"{file}: model_type is {kind!r}, which is not known here; use one of "
                f"{', '.join(sorted(_known_types()))}."
            )
    elif model is None:
        raise UserError(
            f"--source={source}: no layout of transformers; add --model={'|'.join(names())}."
        )
    else:
        name = model
    if model is not None and model not in ({"bert", name} if name == "encoder" else {name}):
        raise UserError(
            f"--model={model}: {source} holds no {model} (it is read as: {name}); leave --model "
            "out."
        )
    return name


def _known_types() -> set[str]:
    checked = [entry for entry in architectures().values() if entry.check]
    return set(text_encoders.FAMILIES).union(*(entry.known_types for entry in checked))


def _is_published(source: Path) -> bool:
    if is_weights_folder(source) or not (source / text_encoders.CONFIG).is_file():
        return False
    content = read_json(source / text_encoders.CONFIG)
    return isinstance(content, dict) and "model_type" in content


def _load(name: str, source: Path, converted: Path | None) -> Any:
    if converted is not None:
        return load_converted(converted, param_dtype="float32")
    if is_weights_folder(source):
        return load_converted(source, param_dtype="float32")
    if name == "reranker":
        return text_encoders.load_cross_encoder(source)
    if name == "encoder":
        return text_encoders.load_text_encoder(source)
    return load_published(name, source)


# transformers' side.


_STACKS = ("layer", "layers", "block", "blocks")  # names of a stack of layers


def outputs(
    folder: Path, check: Check, arrays: Mapping[str, np.ndarray], *, dtype: str = "float32"
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Loads a folder's model, runs it and forgets it.

    Args:
      arrays: inputs of transformers, by name.
      dtype: of parameters and arithmetic; norms and rotary angles are float32 in any case.

    Returns:
      Of each stack what goes into each layer (Qwen3-VL adds to what the one before gave), and what
      the last gives, [layers + 1, ...]; and the ends of the output.
    """
    import torch
    import transformers

    kind_of_model = getattr(transformers, check.model)
    model = kind_of_model.from_pretrained(
        folder,
        dtype=getattr(torch, dtype),
        attn_implementation="eager",
        local_files_only=True,
        trust_remote_code=False,
    ).eval()
    states_of: dict[str, list[np.ndarray]] = {name: [] for name in check.stacks}
    for name, path in check.stacks.items():
        module = _module(model, path)
        if module is None:  # Gemma 4's 12B has no tower
            del states_of[name]
            continue
        layers = _layers(module)
        for layer in layers:
            layer.register_forward_pre_hook(_entering(states_of[name]), with_kwargs=True)
        layers[-1].register_forward_hook(_leaving(states_of[name]))
    inputs = {
        name: torch.from_numpy(value.astype(np.int64 if value.dtype.kind == "i" else dtype))
        for name, value in arrays.items()
    }
    with torch.no_grad():
        made = model(**inputs)
    ended = {name: getattr(made, attribute).numpy() for name, attribute in check.ends.items()}
    return {name: np.stack(states) for name, states in states_of.items()}, ended


def _module(model: Any, path: str | tuple[str, ...]) -> Any:
    """The first module of these paths that the model has; None: it has none."""
    modules = dict(model.named_modules())
    return next(
        (modules[name] for name in ([path] if isinstance(path, str) else path) if name in modules),
        None,
    )


def _layers(module: Any) -> Any:
    """The first stack of layers in a module."""
    for name, child in module.named_modules():
        if name.rpartition(".")[2] in _STACKS and type(child).__name__ == "ModuleList":
            return child
    raise ValueError(f"{type(module).__name__} has no stack of layers")


# Hooks of a layer, which keep what enters and what leaves it.


_ENTRIES = ("hidden_states", "hidden_state")  # the second is of Llama 4's tower


def _entering(states: list[np.ndarray]) -> Callable[..., None]:
    def hook(module: Any, positional: tuple[Any, ...], named: Mapping[str, Any]) -> None:
        entered = (
            positional[0] if positional else next(named[name] for name in _ENTRIES if name in named)
        )
        states.append(entered.numpy().copy())

    return hook


def _leaving(states: list[np.ndarray]) -> Callable[..., None]:
    def hook(module: Any, positional: tuple[Any, ...], left: Any) -> None:
        states.append((left[0] if isinstance(left, tuple) else left).numpy().copy())

    return hook
