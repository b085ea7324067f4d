"""A searcher's episodes and the trainer's bits do not depend on how many devices there are."""

import jax
import pytest
from cli_runs import LANDS, done, flags_with, rows_of, write_documents
from verbs_on_mesh import on_devices

# Compiled as for users: other programs have other bits.
pytestmark = [pytest.mark.slow, pytest.mark.optimized]

# Two rows for each of eight devices; vowels are paid for.
RUN = {
    "episodes.results_by": "message", "episodes.turns": 2, "batches.batch_size": 16,
    "batches.length": 640, "grpo.group": 4, "grpo.draws": 1, "exact": True, "episodes.slots": 16,
    "train.steps": 2, "train.checkpoint_every": 0, "train.optimizer.learning_rate": 0.01,
    "train.optimizer.warmup": 0.0,
}  # fmt: skip
REWARD = "def vowels(episode):\n    return sum(x in 'aeiou' for x in episode.turns[0].text) / 9\n"


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("searcher")
    questions = [
        {"id": f"q{n}", "split": "train", "question": f"What is the capital of {land}?",
         "answers": [LANDS[land]]}
        for n, land in enumerate(LANDS)
    ]  # fmt: skip
    (folder / "rewards.py").write_text(REWARD)
    write_documents(folder / "documents", questions)
    done("prepare", "corpus", f"--raw={folder / 'documents'}", f"--out={folder / 'data'}")
    return folder


def test_episodes_and_bits(inputs):
    """On one and eight devices; of the second step the gradients were summed elsewhere,
    so that its episodes may differ, but not the bits of trainer and engine."""
    first = []
    for data in (1, 8):
        run = inputs / f"on_{data}"
        values = {**RUN, "data.dir": inputs / "data", "mesh.data": data}
        values["reward.function"] = f"{inputs / 'rewards.py'}:vowels"
        with on_devices(jax.devices()[:data]):
            done(*flags_with("train", "atlas/searcher.py:runlocal", run, values), initializers=True)
        rows = rows_of(run / "metrics.jsonl")
        assert [row["engine_gap"] for row in rows] == [0, 0], data
        assert rows[1]["grad_norm"] > 0
        first.append((run / "rollouts" / "000000.jsonl").read_bytes())
    assert first == first[:1] * 2
    for run, devices in (("on_1", 8), ("on_8", 1)):
        with on_devices(jax.devices()[:devices]):
            again = done("replay", inputs / run, "--steps=0", initializers=True)
        assert again == {"steps": [0], "batches": 1, "episodes": 16}
