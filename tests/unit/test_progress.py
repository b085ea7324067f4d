"""Progress: rate, time left, pauses and plain lines, by a clock that the test turns."""

import io

import pytest
from rich.console import Console

from mmqa_jax.core.progress import Progress, duration, within
from tests.refusals import refuses


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def make(clock, *, terminal=False, **arguments):
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=120)
    return Progress("Training", console=console, clock=clock, quiet=False, **arguments), out


def test_rate_and_time_left_exclude_pauses_and_the_first_step():
    clock = Clock()
    progress, _ = make(clock, total=100, unit="steps")
    with progress:
        clock.now = 50  # compiling
        progress.advance()
        clock.now = 60
        progress.advance(20)
        with progress.paused():
            clock.now = 560  # evaluation
        assert progress.rate() == pytest.approx(2.0)
        assert progress.seconds_left() == pytest.approx(79 / 2)
        clock.now = 570
        progress.advance(20, loss=0.123456)
        assert progress.rate() == pytest.approx(2.0)
        assert progress.text() == "41/100 steps (41%), 2.0 steps/s, 0:30 left, loss 0.1235"
        assert progress.active_seconds() == 70


def test_steps_of_an_earlier_attempt_count_in_the_share_alone():
    clock = Clock()
    progress, _ = make(clock, total=100, unit="steps", start=50)
    with progress:
        progress.advance()
        clock.now = 10
        progress.advance(4)
        assert progress.text() == "55/100 steps (55%), 2.5 s per step, 1:52 left"


def test_without_a_terminal_one_line_at_most_every_15_seconds():
    clock = Clock()
    progress, out = make(clock, total=100, unit="steps")
    with progress:
        for second in range(1, 101):
            clock.now = float(second)
            progress.advance()
    lines = out.getvalue().splitlines()
    assert len(lines) == 100 // 15 + 1
    assert lines[0] == "Training: 15/100 steps (15%), 1.0 steps/s, 1:25 left"
    assert lines[-1] == "Training: 100 steps in 1:40, 1.0 steps/s"


def test_the_closing_rate_is_that_of_the_whole_time():
    """The first of 18 answers takes most of it; others were there from the start."""
    clock = Clock()
    progress, out = make(clock, unit="requests", total=18)
    with progress:
        clock.now = 38.0
        progress.advance()
        clock.now = 41.0
        progress.advance(17)
        assert progress.rate() == pytest.approx(17 / 3)
    assert out.getvalue().splitlines()[-1] == "Training: 18 requests in 0:41, 2.3 s per request"
    clock.now = 0.0
    progress, out = make(clock, unit="requests", total=18, start=8)
    with progress:
        clock.now = 5.0
        progress.advance(10)
    assert out.getvalue() == "Training: 18 requests (8 of them earlier) in 0:05, 2.0 requests/s\n"


def test_an_error_is_not_shown_as_success():
    progress, out = make(Clock(), total=10, unit="steps")

    def work():
        with progress:
            progress.advance(3)
            raise ValueError("x")

    refuses("x", work, error=ValueError)
    assert out.getvalue() == "Training: 3/10 steps (30%), stopped\n"


def test_on_a_terminal_a_bar_and_another_inside_the_pause():
    clock = Clock()
    progress, out = make(clock, terminal=True, total=4, unit="steps")
    with progress:
        progress.advance(2)
        inner, inner_out = make(clock, terminal=True, total=1, unit="questions")
        with progress.paused(), inner:
            inner.advance()
        clock.now = 4
        progress.advance(2)
    assert "4 steps in 0:04, 1.0 steps/s" in out.getvalue()
    assert "1 questions in 0:00" in inner_out.getvalue()


def test_unknown_total_and_quiet(monkeypatch):
    clock = Clock()
    progress, out = make(clock, unit="rows")
    with progress:
        progress.advance()
        clock.now = 20
        progress.advance(40)
    assert out.getvalue().splitlines()[0] == "Training: 41 rows, 2.0 rows/s"
    monkeypatch.setenv("MMQA_PROGRESS", "off")
    silent = io.StringIO()
    with Progress("x", total=1, console=Console(file=silent, force_terminal=True)) as progress:
        progress.advance()
    assert silent.getvalue() == ""


@pytest.mark.parametrize(("seconds", "text"), [(7.4, "0:07"), (725, "12:05"), (10800, "3:00:00")])
def test_duration(seconds, text):
    assert duration(seconds) == text


def test_the_state_of_a_larger_work_is_shown_behind():
    clock = Clock()
    progress, _ = make(clock, total=100, unit="steps")
    with progress, within(lambda left: f"{left or 0:.0f} s and 5 min more"):
        progress.advance()
        clock.now = 10
        progress.advance(10, loss=0.5)
        shown = progress.text()
    assert shown == "11/100 steps (11%), 1.0 steps/s, 1:29 left, loss 0.5, 89 s and 5 min more"
    assert "more" not in progress.text()
