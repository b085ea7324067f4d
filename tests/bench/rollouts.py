"""`python -m tests.bench rollouts --data=RUN/rollouts`: how much of a searcher's engine waits.

A simulation with the lengths of the turns that a run drew. All slots decode together, so that a
step of a batch takes as long for one episode as for all; what waits is a slot without an episode.
`ours` takes turns together, as the loop does: the next ones begin when the last has ended and the
searches are made. `peer` is an engine whose slots take any turn that can begin, which only the end
of the batch keeps waiting. Prompts, searches and updates are left out.

The rows `v5e-64` set the same turns, longer by a factor so that the longest has 512 tokens, against
an update: GRPO of Qwen3-8B on 512 episodes of 4,096 tokens, by the times that `mmqa plan` estimates
(the commands stand in RESULTS.md). `ours` is the share of all chips' time in which a chip, or a slot
of its engine, waits; the shares `decode`, `prefill`, `update` are those of a step.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.files import read_jsonl
from tests.bench import Options

_SLOTS = (4, 8, 16, 32, 64, 128, 256)

# Of `mmqa plan`, bounds by the data sheet: eight chips are an engine of 512 slots, 64 a trainer.
_EPISODES, _TOKENS, _TURN = 512, 4096, 512
_UPDATE = 8 * 1.38663  # seconds of 8 parts of 64 rows on 64 chips
_PREFILL = 0.04329 / 4096  # seconds a token of an engine
_STEP = 0.01776  # seconds of a full decode step
_SLOTS_SHARE = 0.718  # of it reads the cache of slots, the rest weights
_ENGINES = 8


def run(options: Options) -> dict[str, Any]:
    """Shares of slots' steps without an episode, by slots, as means over batches."""
    files = sorted(Path(options.data or "").glob("[0-9]*.jsonl"))
    if not files:
        raise UserError(f"--data={options.data}: holds no batches; name a run's folder rollouts.")
    batches = [[row["tokens"] for _, row in read_jsonl(file)] for file in files]
    most = max(map(len, batches))
    slots = [number for number in _SLOTS if number <= most]
    rows = []
    for name in options.chosen(tuple(map(str, slots))):
        number = int(name)
        ours = [waiting(batch, number, steps_by_turns(batch, number)) for batch in batches]
        peer = [waiting(batch, number, steps_of_any(batch, number)) for batch in batches]
        means = sum(ours) / len(ours), sum(peer) / len(peer)
        rows.append(
            {
                "name": f"{number} slots",
                "ours": round(100 * means[0], 1),
                "peer": round(100 * means[1], 1),
                "ratio": None,
                "unit": "% of slots wait",
                "floor": None,
            }
        )
    rows += planned_rows([turn for batch in batches for turn in batch])
    device = f"simulated, {len(batches)} batches of {most} episodes"
    return {"bench": "rollouts", "device": device, "rows": rows}


def steps_by_turns(batch: Sequence[Sequence[int]], slots: int) -> int:
    """Decode steps of episodes, given by the tokens of their turns, that take turns together."""
    turns = max(map(len, batch))
    lengths = [[episode[n] for episode in batch if len(episode) > n] for n in range(turns)]
    return sum(steps_of_any([[length] for length in turn], slots) for turn in lengths)


def steps_of_any(batch: Sequence[Sequence[int]], slots: int) -> int:
    """Decode steps of episodes whose next turn begins as soon as a slot is free."""
    free = [0] * slots  # when each slot is
    waiting_turns = [(0, number, 0) for number in range(len(batch))]  # from when, whose, which
    end = 0
    while waiting_turns:
        ready, number, turn = heapq.heappop(waiting_turns)
        done = max(ready, heapq.heappop(free)) + batch[number][turn]
        heapq.heappush(free, done)
        end = max(end, done)
        if turn + 1 < len(batch[number]):
            heapq.heappush(waiting_turns, (done, number, turn + 1))
    return end


def waiting(batch: Sequence[Sequence[int]], slots: int, steps: int) -> float:
    """The share of all slots' steps in which they had no episode."""
    return 1 - sum(map(sum, batch)) / (slots * steps)


def planned_rows(episodes: Sequence[Sequence[int]]) -> list[dict[str, Any]]:
    """Shares of a step of Qwen3-8B on v5e-64 in which chips wait, by who takes turns with whom.

    `one mesh`: all chips draw, then all learn. `halves`: half of them draw while the others wait,
    then the others learn. `a step ahead`: both at once, split as it takes the least time, and free
    slots take the next batch's episodes.
    """
    factor = _TURN / max(map(max, episodes))
    longer = [[math.ceil(turn * factor) for turn in episode] for episode in episodes]
    repeated = itertools.cycle(longer)
    batch = [next(repeated) for _ in range(_EPISODES)]
    rows = []
    for name, engines in (("one mesh", _ENGINES), ("halves", _ENGINES // 2)):
        drawn = Drawn.of(batch, engines)
        learning = _UPDATE * _ENGINES / (_ENGINES if name == "one mesh" else _ENGINES - engines)
        whole = drawn.seconds + learning
        waits = drawn.empty * engines / _ENGINES
        if name == "halves":
            waits += (drawn.seconds + learning) / 2
        rows.append(_row(f"v5e-64, {name}", waits / whole, drawn, learning, whole))
    splits = []
    for engines in range(1, _ENGINES):
        drawn = Drawn.full(batch, engines)
        learning = _UPDATE * _ENGINES / (_ENGINES - engines)
        whole = max(drawn.seconds, learning)
        busy = (engines * drawn.seconds + (_ENGINES - engines) * learning) / _ENGINES
        splits.append((whole, engines, 1 - busy / whole, drawn, learning))
    whole, engines, waits, drawn, learning = min(splits, key=lambda split: split[:2])
    name = f"v5e-64, a step ahead, {8 * engines} chips draw"
    return [*rows, _row(name, waits, drawn, learning, whole)]


class Drawn(NamedTuple):
    """Seconds of an engine for its share of a batch: of decoding, of prompts and results, and those
    of decoding in which slots were empty, by their share."""

    decoding: float
    reading: float
    empty: float

    @property
    def seconds(self) -> float:
        """All of them."""
        return self.decoding + self.reading

    @classmethod
    def of(cls, batch: Sequence[Sequence[int]], engines: int) -> Drawn:
        """By turns together, as the loop takes them; a slot for each episode."""
        slots = len(batch) // engines
        share = batch[:slots]
        turns = [[e[n] for e in share if len(e) > n] for n in range(max(map(len, share)))]
        decoding = empty = 0.0
        for lengths in turns:
            for step in range(max(lengths)):
                active = sum(length > step for length in lengths)
                decoding += step_seconds(active)
                empty += step_seconds(active) * (1 - active / slots)
        return cls(decoding, _reading(share), empty)

    @classmethod
    def full(cls, batch: Sequence[Sequence[int]], engines: int) -> Drawn:
        """With every slot in use all the time."""
        slots = len(batch) // engines
        return cls(
            sum(map(sum, batch)) / len(batch) * step_seconds(slots), _reading(batch[:slots]), 0.0
        )


def step_seconds(active: int) -> float:
    """Of a decode step of so many slots: weights are read once, the cache of each."""
    return _STEP * (1 - _SLOTS_SHARE + _SLOTS_SHARE * active / 512)


def _reading(batch: Sequence[Sequence[int]]) -> float:
    """Seconds of prompts and results: all tokens of the episodes that were not drawn."""
    return sum(max(_TOKENS - sum(episode), 0) for episode in batch) * _PREFILL


def _row(name: str, waits: float, drawn: Drawn, learning: float, whole: float) -> dict[str, Any]:
    shares = {
        "decode": drawn.decoding / whole,
        "prefill": drawn.reading / whole,
        "update": learning / whole,
    }
    return {
        "name": name,
        "ours": round(100 * waits, 1),
        "peer": None,
        "ratio": None,
        "unit": "% waits",
        "floor": None,
        **{key: f"{100 * share:.0f} %" for key, share in shares.items()},
        "step": f"{whole:.1f} s",
    }
