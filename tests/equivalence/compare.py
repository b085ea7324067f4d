"""What the comparisons share: tolerances, compiling, one layer at a time, exports, meshes.

The precision of matrix products is conftest.py's.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from mmqa_jax.core.mesh import make_mesh, state_shardings
from mmqa_jax.weights.keymap import traced_model

if TYPE_CHECKING:  # the scripts on eight devices do without torch
    import torch

    from mmqa_jax.training.state import Objective

LAYER = {"rtol": 0, "atol": 1e-5}  # one layer on the original's own input, float32
WHOLE = {"rtol": 0, "atol": 1e-4}  # a whole model


@functools.partial(jax.jit, static_argnums=(0, 1))
def _run(function, graphdef, state, *args):
    return function(nnx.merge(graphdef, state), *args)


def compiled(model: nnx.Module, function: Callable) -> Callable:
    """`function(model, *args)` as a compiled function of args alone; it gives NumPy arrays.

    Models of one config compile a function once.
    """
    graphdef, state = nnx.split(model)
    return lambda *args: jax.device_get(_run(function, graphdef, state, *args))


def descent(objective: Objective, graphdef: nnx.GraphDef, rate: float) -> Callable:
    """A compiled step of plain gradient descent: state, batch -> loss before it, next state."""

    @jax.jit
    def step(state, batch):
        def loss(state):
            return objective.loss(nnx.merge(graphdef, state), batch, None)[0]

        value, gradient = jax.value_and_grad(loss)(state)
        return value, jax.tree.map(lambda x, dx: x - rate * dx, state, gradient)

    return step


def forward(model: nnx.Module, *args: Any) -> Any:
    """The model's own forward, for `compiled`."""
    return model(*args)


def alone(stack: nnx.Module, call: Callable, inputs: jax.Array) -> jax.Array:
    """Each layer of a stack by itself, so that errors do not add up.

    Args:
      stack: made by `layers.stack_layers`.
      call: (layer, input) -> output.
      inputs: [layers, ...], the original's.

    Returns:
      [layers, ...].
    """
    graphdef, params = nnx.split(stack)
    return jax.lax.map(lambda pair: call(nnx.merge(graphdef, pair[0]), pair[1]), (params, inputs))


def abstract(kind: type[nnx.Module], config: Any) -> nnx.Module:
    """A model of shapes, traced once with those that are loaded; without keys, see `layers.param`."""
    return nnx.merge(*traced_model(kind, config))


def copied(x: jax.Array) -> jax.Array:
    """The same values in an array of its own; jax.numpy would compile a program for each shape."""
    return jax.device_put(np.array(x))


def random_model(kind: type[nnx.Module], config: Any, seed: int = 0) -> nnx.Module:
    """A model of random numbers, of which none is as at first; no program makes them."""
    rng = np.random.default_rng(seed)
    graphdef, state = nnx.split(abstract(kind, config))
    made = jax.tree.map(lambda x: np.float32(0.3) * rng.standard_normal(x.shape, "f4"), state)
    return nnx.merge(graphdef, jax.device_put(made))


def with_config(model: nnx.Module, config: Any) -> nnx.Module:
    """The model's parameters under another config of the same sizes."""
    return nnx.merge(nnx.graphdef(abstract(type(model), config)), nnx.state(model))


def randomize(model: torch.nn.Module, seed: int, scale: float = 0.1) -> torch.nn.Module:
    """Adds noise: fresh biases are 0 and norms 1, which would hide a missing or swapped one.

    A lone number (CLIP's temperature) stays as it is.
    """
    import torch

    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim:
                parameter.add_(scale * torch.randn(parameter.shape, generator=generator))
        for name, buffer in model.named_buffers():  # of experts, which are published
            if name.endswith(("e_score_correction_bias", "expert_bias")):
                buffer.add_(scale * torch.randn(buffer.shape, generator=generator))
    return model.eval()


def deviation(got: Any, want: Any) -> np.ndarray:
    """Root mean square of the difference, in units of want's."""
    return np.sqrt(np.mean(np.square(got - want)) / np.mean(np.square(want)))


def near_in_bfloat16(ours: tuple[Any, Any], theirs: tuple[torch.Tensor, torch.Tensor]) -> None:
    """Checks that our bfloat16 run strays from our float32 run no further than torch's from its.

    In root mean square, 1.25 times as far is allowed; no way at all would mean that the type was
    ignored.

    Args:
      ours, theirs: what a model computes in bfloat16, and in float32.
    """
    strayed = deviation(*(np.asarray(x, np.float32) for x in ours))
    assert strayed > 1e-4
    allowed = 1.25 * deviation(*(x.float().numpy() for x in theirs))
    np.testing.assert_allclose(strayed, 0, rtol=0, atol=allowed)


def same_gradients(got: Mapping[str, np.ndarray], theirs: torch.nn.Module, zero: str) -> None:
    """Compares gradients with those that torch has left in its model.

    Args:
      got: ours under torch's names and layouts: a key map run backwards puts them there.
      theirs: the torch model after `backward`.
      zero: regular expression of names whose gradient is nothing but rounding: softmax ignores
        the bias of keys.
    """
    wanted = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    assert got.keys() == wanted.keys()
    for name, want in wanted.items():
        if want is None:  # the loss does not depend on it
            assert not got[name].any(), name
            continue
        want = want.numpy()
        np.testing.assert_allclose(got[name], want, **WHOLE, err_msg=name)
        # Small gradients are as right as large ones.
        assert deviation(got[name], want) < 1e-4 or re.search(zero, name), name


def same_parameters(model: nnx.Module, other: nnx.Module) -> None:
    """Compares all parameters, bit by bit."""
    jax.tree.map(np.testing.assert_array_equal, nnx.state(model), nnx.state(other))


def reloaded(kind: Any, folder: Path, **options: Any) -> Any:
    """An exported model as transformers reads it, of which no tensor is missing or too much.

    Args:
      kind: the class of transformers.
      options: of its `from_pretrained`.
    """
    model, report = kind.from_pretrained(folder, output_loading_info=True, **options)
    for what in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        assert not report[what], (what, report[what])
    return model


def names_its_axes(
    model: nnx.Module,
    known: Collection[str | None] | None = None,
    stacks: Collection[str] = ("layers",),
) -> None:
    """Checks the logical names of every parameter's axes.

    Args:
      model: may be abstract.
      known: the names that may be used; None: any.
      stacks: parts of a path under which layers are stacked, and nowhere else.
    """
    for path, variable in nnx.to_flat_state(nnx.state(model)):
        names = variable.get_metadata()["out_sharding"]
        assert len(names) == len(variable.get_value().shape), path
        assert known is None or set(names) <= set(known), path
        used = [name for name in names if name is not None]
        assert len(set(used)) == len(used), path
        assert ("layers" in names[:1]) == any(part in stacks for part in path), path


def load_on_mesh(load: Callable[..., nnx.Module]) -> tuple[Mesh, nnx.Module, nnx.Module]:
    """Loads a checkpoint straight onto a 2 x 2 x 2 mesh, and on one device.

    Args:
      load: takes `mesh`, or nothing.

    Returns:
      The mesh, the model on it and the one on one device, of which is checked that they hold the
      same values and that the former lie where the rules say.
    """
    mesh = make_mesh({"data": 2, "fsdp": 2, "tensor": 2})
    spread, whole = load(mesh=mesh), load()
    same_parameters(spread, whole)
    state = nnx.state(spread)
    shardings = state_shardings(state, mesh)
    assert all(jax.tree.leaves(jax.tree.map(lambda a, s: a.sharding == s, state, shardings)))
    return mesh, spread, whole
