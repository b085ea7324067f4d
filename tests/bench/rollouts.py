"""`python -m tests.bench rollouts --data=RUN/rollouts`: how much of a searcher's engine waits.

A simulation with the lengths of the turns that a run drew. All slots decode together, so that a
step of a batch takes as long for one episode as for all; what waits is a slot without an episode.
`ours` takes turns together, as the loop does: the next ones begin when the last has ended and the
searches are made. `peer` is an engine whose slots take any turn that can begin, which only the end
of the batch keeps waiting. Prompts, searches and updates are left out.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.files import read_jsonl
from tests.bench import Options

_SLOTS = (4, 8, 16, 32, 64, 128, 256)


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
