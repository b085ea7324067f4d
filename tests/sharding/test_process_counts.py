"""Training is the same on one, two and four processes, wherever the rows of a batch lie."""

from __future__ import annotations

import pytest
from processes import curve, finish, tiny


@pytest.mark.parametrize(
    ("count", "mesh", "order"),
    [
        (2, {"data": 4}, [0, 2, 3, 1]),  # process 0 has the first and the last rows
        (4, {"fsdp": 2, "tensor": 2}, [0, 3, 1, 2]),  # two processes need the same rows
        (2, {"data": 1, "tensor": 4}, [0, 1, 2, 3]),  # all need all of them
    ],
)
def test_losses_do_not_depend_on_the_processes(alone, tmp_path, count, mesh, order):
    finish(tiny(count, tmp_path, devices=4 // count, mesh=mesh, order=order))
    losses = curve(tmp_path)
    assert sorted(losses) == list(range(1, 51))
    assert losses == pytest.approx(curve(alone), abs=1e-6)


def test_pretrained_weights_start_a_run_on_processes_too(alone, tmp_path):
    """Each process reads them onto its own device; the parameters are split over both."""
    options = {"start": str(alone), "train": {"steps": 5, "log_every": 1, "evaluate_every": 0}}
    finish(tiny(1, tmp_path / "one", devices=2, **options))
    finish(tiny(2, tmp_path / "two", mesh={"tensor": 2, "data": 1}, **options))
    one, two = curve(tmp_path / "one"), curve(tmp_path / "two")
    assert two == pytest.approx(one, abs=1e-6)
    assert abs(one[1] - curve(alone)[1]) > 0.01  # it did not start from scratch
