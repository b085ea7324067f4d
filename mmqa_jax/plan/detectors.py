"""The program that finds the regions of pictures, by detectors known by name, without weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.mesh import batch_sharding, on_shardings, state_shardings
from mmqa_jax.core.serving import AUTO, planned_batch_size, serving_mesh
from mmqa_jax.data.detector_pictures import bucket, detector_size
from mmqa_jax.inference.region_detector import KINDS, DetectorKind, detector_cost, make_find
from mmqa_jax.models.detection.faster_rcnn import FasterRCNN, Pictures
from mmqa_jax.plan.program import Planned, Program, shard_bytes, tree_bytes

REGIONS = "regions"  # the program
DETECTORS: Mapping[str, DetectorKind] = {kind.name: kind for kind in KINDS}
PHOTO = (640, 480)  # width and height before resizing; most photos are 4 to 3


def detector_program(name: str, devices: Sequence[jax.Device]) -> Program:
    """A full batch of photos, 4 wide to 3 high, for one of DETECTORS on devices of one process."""
    kind, mesh = DETECTORS[name], serving_mesh(None, devices)
    dtype = "float32" if devices[0].platform == "cpu" else "bfloat16"
    backbone = dataclasses.replace(kind.config.backbone, dtype=dtype)
    config = dataclasses.replace(kind.config, backbone=backbone)
    graphdef, state = nnx.split(nnx.eval_shape(lambda: FasterRCNN(config, rngs=nnx.Rngs())))
    state = on_shardings(state, state_shardings(state, mesh))
    held = shard_bytes(state)
    count = planned_batch_size(AUTO, detector_cost(config, kind.pictures), mesh, held)
    width, height, _ = detector_size(*PHOTO, kind.pictures)
    rows = batch_sharding(mesh)

    def of_pictures(dtype: type, *shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((count, *shape), dtype, sharding=rows)

    pictures = Pictures(
        pixels=of_pictures(np.float32, *bucket((height, width)), 3),
        sizes=of_pictures(np.int32, 2),
        originals=of_pictures(np.int32, 2),
        scales=of_pictures(np.float32),
    )
    return Program.of(
        REGIONS,
        make_find(graphdef),
        (state, pictures),
        mesh,
        parameters=held,
        examples=count,
        unit="pictures",
        input_bytes=tree_bytes(pictures),
    )


def check_pictures(pictures: int, programs: Sequence[str]) -> None:
    """UserError for `--pictures` of no picture, or of other programs than a detector's."""
    if pictures < 1:
        raise UserError(f"--pictures={pictures}: at least 1 was expected; correct it.")
    if tuple(programs) != (REGIONS,):
        raise UserError(
            f"--pictures={pictures}: only a detector takes pictures; name one by "
            f"--model={', '.join(DETECTORS)}, or leave the flag out."
        )


def pictures_cost(planned: Planned, pictures: int, devices: int) -> dict[str, Any]:
    """Bounds the time that so many pictures take: `pictures`, `hours_bound` and `chip_hours_bound`.

    And `pictures_per_second_bound`, how many there are a second at most, on all devices.

    Args:
      devices: of all hosts, each of which does its share.

    Returns:
      None for hours and rate where the program does not fit.
    """
    program, hours, chips, rate = planned.compiled.program, None, None, None
    if planned.bound is not None:
        calls = pictures / program.examples * program.devices / devices
        hours = calls * planned.bound.seconds / 3600
        chips = hours * devices / planned.chip.of_chip
        rate = pictures / (3600 * hours)
    return {
        "pictures": pictures,
        "hours_bound": hours,
        "chip_hours_bound": chips,
        "pictures_per_second_bound": rate,
    }
