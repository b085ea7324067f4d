"""The time left of a demo, and the precision that it runs in."""

import pytest

from mmqa_jax.core.host import best_precision
from mmqa_jax.runs.status import STAGES, seconds_left


def test_the_time_left_is_in_proportion_to_that_of_the_finished_stages():
    assert seconds_left({}) is None
    whole = 1000.0
    records = {}
    for name, share in STAGES.items():
        records[name] = {"seconds": whole * share}
        left = whole * (sum(STAGES.values()) - sum(STAGES[name] for name in records))
        assert seconds_left(records) == pytest.approx(left, abs=1e-6)


def test_the_precision_is_chosen_by_the_measured_rates():
    assert best_precision({"float32": 100.0, "bfloat16": 200.0}) == "bfloat16"
    assert best_precision({"float32": 100.0, "bfloat16": 105.0}) == "float32"
    assert best_precision({"float32": 100.0, "bfloat16": 20.0}) == "float32"
