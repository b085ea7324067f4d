"""Rows `*_batch` and `*_torchvision` of `tests.bench detector`: whole batches, as accelerators get them.

The batch is that of `mmqa features` and `mmqa plan`: photos of 4 to 3, as many as the device's
memory takes. Weights are random, so that boxes are near their anchors and probabilities alike:
suppression in classes may take other numbers of rounds than with trained ones.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Mapping
from importlib import metadata
from typing import Any

import jax
import numpy as np
import torch
from flax import nnx

from mmqa_jax.core.flops import traced_flops
from mmqa_jax.core.mesh import init_sharded, platform
from mmqa_jax.core.serving import AUTO, planned_batch_size, serving_mesh
from mmqa_jax.data.pictures.resize import bucket, detector_size
from mmqa_jax.inference.region_detector import DetectorKind, detector_cost, make_find
from mmqa_jax.models.detection.faster_rcnn import FasterRCNN, Pictures
from mmqa_jax.models.detection.keys import publish_detector
from mmqa_jax.plan.program import shard_bytes
from mmqa_jax.plan.programs import PHOTO
from tests.bench import torch_reference
from tests.bench.runner import Case, Work
from tests.bench.torchvision_detectors import importable, torchvision_detector

_GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Drawn:
    """A detector on the first device with its batch.

    Attributes:
      kind: its original, in the device's type.
      model: with random weights.
      size: height and width of the pictures, without padding.
      pictures: on the device.
    """

    kind: DetectorKind
    model: FasterRCNN
    size: tuple[int, int]
    pictures: Pictures

    @classmethod
    def of(cls, kind: DetectorKind, size: tuple[int, int] | None, count: int | None) -> Drawn:
        """The published sides and the batch that fits, unless they are given."""
        mesh = serving_mesh(None, jax.devices()[:1])
        dtype = "float32" if platform() == "cpu" else "bfloat16"
        backbone = dataclasses.replace(kind.config.backbone, dtype=dtype)
        config = dataclasses.replace(kind.config, backbone=backbone)
        model = init_sharded(lambda: FasterRCNN(config, rngs=nnx.Rngs(0)), mesh)
        if count is None:
            held = shard_bytes(nnx.state(model))
            count = planned_batch_size(AUTO, detector_cost(config, kind.pictures), mesh, held)
        if size is None:
            size = detector_size(*PHOTO, kind.pictures)[1::-1]
        height, width = bucket(size)
        pixels = np.zeros((count, height, width, 3), np.float32)
        rng = np.random.default_rng(0)
        pixels[:, : size[0], : size[1]] = 50 * rng.normal(size=(count, *size, 3))
        sizes = np.full((count, 2), size, np.int32)
        scale = np.full(count, size[0] / PHOTO[1], np.float32)
        originals = np.round(sizes / scale[:, None]).astype(np.int32)
        pictures = jax.device_put(Pictures(pixels, sizes, originals, scale), jax.devices()[0])
        return cls(kind._replace(config=config), model, size, pictures)

    @property
    def work(self) -> str:
        """What is computed, in words."""
        count, height, width, _ = self.pictures.pixels.shape
        config = self.kind.config
        return (
            f"{count} pictures of {height} x {width} px, {sum(config.backbone.blocks)} blocks, "
            f"{config.rpn.after} proposals, {config.backbone.dtype}"
        )


def batch(name: str, drawn: Drawn) -> Case:
    """A whole batch in one call, and its parts one after the other; milliseconds.

    Parts are programs of their own: what they hand on is written to memory, so that their sum may
    be above the whole. `copy` is the batch's way from the host to the device.
    """
    graphdef, state = nnx.split(drawn.model)
    find = make_find(graphdef)
    pictures, host = drawn.pictures, jax.device_get(drawn.pictures)
    began = time.perf_counter()
    compiled = find.lower(state, pictures).compile()
    seconds = time.perf_counter() - began
    regions = jax.block_until_ready(compiled(state, pictures))
    count = len(host.scales)
    return Case(
        name,
        "ms",
        lambda: jax.block_until_ready(compiled(state, pictures)),
        others={
            **parts(graphdef, state, pictures),
            "copy": lambda: jax.block_until_ready(jax.device_put(host, jax.devices()[0])),
        },
        flops=traced_flops(find, state, pictures),
        notes={
            "work": drawn.work,
            "pictures": count,
            "regions": float(np.sum(regions.valid)) / count,
            "compile_seconds": round(seconds, 1),
            **_memory(compiled),
        },
        late_notes=_peak,
        clock=_clock(),
    )


def parts(graphdef: nnx.GraphDef, state: nnx.State, pictures: Pictures) -> Mapping[str, Work]:
    """Name -> work: trunk (and pyramid), proposals, pooling with the regions' head, classes."""

    def of_batch(function: Callable[..., Any]) -> Callable[..., Any]:
        """Of (model, ...) of one picture -> of (state, ...) of a batch."""
        return lambda state, *inputs: jax.vmap(
            functools.partial(function, nnx.merge(graphdef, state))
        )(*inputs)

    def trunk(state: nnx.State, pictures: Pictures) -> Any:
        return nnx.merge(graphdef, state).levels(pictures.pixels, pictures.sizes)

    def proposals(state: nnx.State, maps: Any, extents: Any, pictures: Pictures) -> Any:
        model = nnx.merge(graphdef, state)
        levels = [model.rpn(*level) for level in zip(maps, extents, strict=True)]
        return jax.vmap(model.proposals)(extents, levels, pictures)

    trunk_of, (maps, extents) = _compiled(trunk, state, pictures)
    proposals_of, (boxes, valid) = _compiled(proposals, state, maps, extents, pictures)
    regions_of, (features, beside) = _compiled(
        of_batch(FasterRCNN.region_features), state, maps, extents, boxes
    )
    classes_of, _ = _compiled(
        of_batch(FasterRCNN.select_regions), state, boxes, valid, features, beside, pictures
    )
    return {
        "trunk": trunk_of,
        "proposals": proposals_of,
        "regions_features": regions_of,
        "classes": classes_of,
    }


def _compiled(function: Callable[..., Any], *arguments: Any) -> tuple[Work, Any]:
    """What runs a function on the device, and its result."""
    run = jax.jit(function).lower(*arguments).compile()
    return lambda: jax.block_until_ready(run(*arguments)), run(*arguments)


def _memory(compiled: jax.stages.Compiled) -> Mapping[str, float]:
    """What the compiler plans, as `mmqa plan` counts it: `planned_gib`."""
    memory = compiled.memory_analysis()
    if memory is None:
        return {}
    held = memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes
    return {"planned_gib": (held - memory.alias_size_in_bytes) / _GIB}


def _peak() -> Mapping[str, float]:
    """The most that this process held of the device so far, what the compiler tried included."""
    stats = jax.devices()[0].memory_stats() or {}
    return {"peak_gib": stats["peak_bytes_in_use"] / _GIB} if "peak_bytes_in_use" in stats else {}


def _clock() -> Callable[[], float]:
    return time.process_time if platform() == "cpu" else time.perf_counter


def torchvision(name: str, drawn: Drawn) -> Case:
    """The batch beside torchvision's Faster R-CNN of the same sizes and weights, on the same device.

    On a GPU it computes in bfloat16 by autocast, channels last.
    """
    graphdef, state = nnx.split(drawn.model)
    find = make_find(graphdef)
    peer, others, notes = None, {}, {"torchvision": "cannot be imported"}
    if importable():
        peer, others = _torchvision_sides(drawn, state)
        notes = {"torchvision": metadata.version("torchvision")}
    return Case(
        name,
        "ms",
        lambda: jax.block_until_ready(find(state, drawn.pictures)),
        peer,
        others=others,
        flops=traced_flops(find, state, drawn.pictures),
        notes={"work": drawn.work, **notes},
        clock=_clock(),
    )


def _torchvision_sides(drawn: Drawn, state: nnx.State) -> tuple[Work, Mapping[str, Work]]:
    """With suppression in all classes; and with torchvision's own threshold of .05."""
    config, device = drawn.kind.config, torch_reference.prepare_torch()
    source = publish_detector(config, state).source
    tensors = {key: torch.from_numpy(np.array(source.read(key))) for key in source.specs()}
    padded = drawn.pictures.pixels.shape[1:3]
    theirs = torchvision_detector(config, tensors, padded).to(device)
    theirs = theirs.to(memory_format=torch.channels_last)
    pixels = torch.from_numpy(np.array(drawn.pictures.pixels)).permute(0, 3, 1, 2)
    pictures = list(pixels.contiguous().to(device))

    def regions(least: float) -> None:
        theirs.roi_heads.score_thresh = least
        low = device != "cpu"
        with torch.inference_mode(), torch.autocast(device, torch.bfloat16, enabled=low):
            theirs(pictures)
        if low:
            torch.cuda.synchronize()

    return functools.partial(regions, 0.0), {
        "peer_above_0.05": functools.partial(regions, 0.05),
        "peer_trunk": functools.partial(_trunk, theirs, torch.stack(pictures), device),
    }


def _trunk(theirs: torch.nn.Module, pixels: torch.Tensor, device: str) -> None:
    """Feature maps alone."""
    low = device != "cpu"
    with torch.inference_mode(), torch.autocast(device, torch.bfloat16, enabled=low):
        theirs.backbone(pixels.to(memory_format=torch.channels_last))
    if low:
        torch.cuda.synchronize()


_SMALL = ((64, 96), 2)  # sides and number of pictures of the small size


def case(row: str, kind: DetectorKind, size: str) -> Case:
    """A row of BATCHES or BESIDE; `kind` with the depth of `size`."""
    drawn = Drawn.of(kind, *(_SMALL if size == "small" else (None, None)))
    return (torchvision if row.endswith("_torchvision") else batch)(row, drawn)


def names(kinds: tuple[str, ...], of_torchvision: tuple[str, ...]) -> tuple[str, ...]:
    """The rows: a batch of each detector, then those that torchvision can build."""
    return (
        *(f"{kind}_batch" for kind in kinds),
        *(f"{kind}_torchvision" for kind in of_torchvision),
    )
