"""Facts of compiled programs are those of the program that is lowered, or measured anew."""

import jax
import jax.numpy as jnp
import pytest

from tests.hlo import kept


def lowered(factor: float) -> jax.stages.Lowered:
    return jax.jit(lambda x: x * factor).lower(jnp.zeros(3))


@pytest.fixture
def measured(tmp_path, monkeypatch):
    """Which programs were compiled and measured."""
    monkeypatch.setattr(kept, "FACTS", tmp_path)
    return []


def facts(factor: float, measured: list[float]) -> dict:
    def measure(compiled: jax.stages.Compiled) -> dict:
        assert compiled(jnp.ones(3))[0] == factor
        measured.append(factor)
        return {"factor": factor}

    return kept.facts_of("program", lowered(factor), measure, __file__)


def test_an_unchanged_program_is_not_compiled_again(measured, monkeypatch):
    monkeypatch.setenv(kept.REFRESH, "1")
    assert facts(2.0, measured) == facts(2.0, measured) == {"factor": 2.0}
    assert measured == [2.0]


def test_a_changed_one_is(measured, monkeypatch):
    monkeypatch.setenv(kept.REFRESH, "1")
    facts(2.0, measured)
    monkeypatch.delenv(kept.REFRESH)
    assert facts(3.0, measured) == {"factor": 3.0}
    assert facts(3.0, measured) == {"factor": 3.0}  # it was not kept: nobody asked for that
    assert facts(2.0, measured) == {"factor": 2.0}
    assert measured == [2.0, 3.0, 3.0]


def test_the_key_holds_compiler_and_counting(measured, monkeypatch, tmp_path):
    program = lowered(2.0)
    key = kept.key_of(program, __file__)
    assert key == kept.key_of(lowered(2.0), __file__)
    other = tmp_path / "measure.py"
    other.write_text("another way to count")
    assert kept.key_of(program, str(other)) != key
    monkeypatch.setattr(kept, "_version", lambda package: "0")
    assert kept.key_of(program, __file__) != key


KERNEL = """
import jax
from jax.experimental import pallas as pl

def twice(x_ref, out_ref):
    out_ref[...] = x_ref[...] * 2.0

def call(x):
    return pl.pallas_call(twice, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype))(x)
"""


def test_a_kernel_has_the_same_key_in_another_checkout():
    """A Mosaic kernel stands in the program with the places of its code, if JAX writes any."""
    keys = set()
    for file, lines_above in (("/here/kernel.py", ""), ("/there/kernel.py", "\n" * 7)):
        names: dict = {}
        exec(compile(lines_above + KERNEL, file, "exec"), names)
        traced = jax.jit(names["call"]).trace(jnp.zeros((8, 128)))
        program = traced.lower(lowering_platforms=("tpu",))
        assert "tpu_custom_call" in program.as_text()
        keys.add(kept.key_of(program, __file__))
    assert len(keys) == 1
