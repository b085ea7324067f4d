"""What every comparison with PyTorch wants, and the option `--deviations`."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from deviations import Measured, table
from flax import nnx

pytest.register_assert_rewrite("compare")  # its assertions say what they compared, too

_ROUNDING = 1e-7  # numpy's own relative tolerance, beside an absolute one that is asked for


def pytest_addoption(parser):
    parser.addoption(
        "--deviations",
        action="store_true",
        help="print the largest deviation of every comparison beside its bound (any -n)",
    )


def pytest_terminal_summary(terminalreporter, config):
    if not config.getoption("--deviations", default=False):
        return
    reports = [report for kind in terminalreporter.stats.values() for report in kind]
    found = [
        (report.nodeid, Measured(*numbers))
        for report in reports
        if getattr(report, "when", None) == "call"
        for name, value in report.user_properties
        if name == "deviations"
        for numbers in value.values()
    ]
    terminalreporter.section("largest deviations")
    for line in table(found):
        terminalreporter.line(line)


@pytest.fixture(autouse=True)
def _deviations(request, monkeypatch):
    """With --deviations, measures every comparison within an absolute bound."""
    if not request.config.getoption("--deviations", default=False):
        return
    # It travels with the test's report, from xdist's workers too: builtin types alone.
    largest: dict[str, list[float]] = {}
    request.node.user_properties.append(("deviations", largest))
    compare = np.testing.assert_allclose

    def compare_and_measure(actual, desired, rtol=_ROUNDING, atol=0, **options):
        compare(actual, desired, rtol=rtol, atol=atol, **options)
        if rtol <= _ROUNDING and atol > 0:
            measured = Measured.of(actual, desired, atol)
            before = Measured(*largest.get(str(measured.allowed), measured))
            largest[str(measured.allowed)] = [*measured.join(before)]

    monkeypatch.setattr(np.testing, "assert_allclose", compare_and_measure)


@pytest.fixture(scope="session", autouse=True)
def _torch_in_one_thread():
    """The original computes in one thread.

    In CI, what the second thread had of an elementwise tanh once came out 2e-5 off, while our
    side was bit-equal to what it is elsewhere.
    """
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def sentence_transformers():
    """The library, which is slow to import: by those workers alone whose tests compare with it."""
    import sentence_transformers

    return sentence_transformers


@pytest.fixture(autouse=True)
def _exact():
    """Matrix products in whole float32 on every device."""
    with jax.default_matmul_precision("highest"):
        yield


@pytest.fixture
def in_float64(monkeypatch):
    """(record, model) -> the model in float64, as are all values of a test that asks for this."""
    with jax.enable_x64(True):
        monkeypatch.setattr(jnp, "float32", jnp.float64)

        def widened(record, model):
            record = dataclasses.replace(record, changes=(("dtype", "float64"),))
            wide = nnx.eval_shape(lambda: record.build(rngs=nnx.Rngs(0)))
            state = jax.tree.map(lambda x: jnp.asarray(np.asarray(x), "float64"), nnx.state(model))
            return nnx.merge(nnx.graphdef(wide), state)

        yield widened
