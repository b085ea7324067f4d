"""several_mmqa.py on devices that jax.make_mesh does not put in order, as on slices that are rings."""

from __future__ import annotations

import sys

import jax
from several_mmqa import codes

from tests import cheap_jax

cheap_jax.lower_in_one_context()
cheap_jax.keep_programs_of_every_process()
_make_mesh = jax.make_mesh


def in_a_ring(shapes, names, *, devices, **options):
    """The mesh 0, 2, 3, 1: the first of two processes has the first and the last rows."""
    assert len(devices) == 4
    return _make_mesh(shapes, names, devices=[devices[i] for i in (0, 2, 3, 1)], **options)


jax.make_mesh = in_a_ring
sys.exit(max(codes(sys.argv[1:])))
