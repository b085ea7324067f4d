"""`tests.bench`: how it times and measures memory, what its rows say, what it needs to run."""

import builtins
import dataclasses
import importlib
import itertools
import os
import re
from pathlib import Path

import pytest

from mmqa_jax.core.errors import RunError
from mmqa_jax.data.documents.read import READERS, ending_of
from tests.bench import Options
from tests.bench.__main__ import main
from tests.bench.timing import interleave, speed_ratio

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
COLUMNS = {"name", "ours", "peer", "ratio", "unit", "floor"}
# What a bare accelerator image lacks of what the project needs.
ABSENT = (
    "array_record", "bm25s", "evaluate", "grain", "jaxtyping", "matplotlib", "ml_collections",
    "PIL", "scann", "tensorboardX", "tensorflow", "tensorflow_datasets", "torchvision",
)  # fmt: skip


def worker(now: list[float], seconds: list[float]):
    """Work of which each call takes the next of `seconds`, by the clock `now`."""
    left = iter(seconds)

    def work():
        now[0] += next(left)

    return work


def test_the_first_round_is_not_counted():
    now = [0.0]
    sides = {"ours": worker(now, [9.0, 1.0, 2.0, 3.0]), "peer": worker(now, [9.0, 4.0, 4.0, 9.0])}
    measured = interleave(sides, 3, clock=lambda: now[0])
    assert measured == {"ours": [1.0, 2.0, 3.0], "peer": [4.0, 4.0, 9.0]}
    assert speed_ratio(measured["ours"], measured["peer"]) == (3.0, 2.0, 4.0)


def tiny():
    """The suite in sizes that compile fast."""
    from mmqa_jax.models.bart.network import BartConfig
    from mmqa_jax.models.bert.network import BertConfig
    from mmqa_jax.models.llama.config import LlamaConfig
    from mmqa_jax.models.mcan.network import FusionConfig, MCANOpenVQAConfig
    from mmqa_jax.models.two_towers.config import CLIPConfig, TextConfig, VisionConfig
    from mmqa_jax.models.vlp.network import VLPConfig
    from tests.bench.models import Suite

    bert = BertConfig(vocab_size=50, hidden=32, layers=1, heads=2, mlp=48, positions=64)
    return Suite(
        clip=CLIPConfig(
            VisionConfig(16, 8, width=16, layers=1, heads=2, mlp_width=24, embed_dim=12),
            TextConfig(30, 8, width=16, layers=1, heads=2, mlp_width=24, embed_dim=12),
        ),
        pictures=2,
        texts=3,
        bert=bert,
        bert_batch=(2, 24),
        vlp=VLPConfig(dataclasses.replace(bert, types=6, eps=1e-5), 9, 7, (10,)),
        vlp_batch=(2, 5, 30),
        mcan=MCANOpenVQAConfig(
            40, FusionConfig(hidden=16, heads=2, mlp=24, layers=1, flat_mlp=12, flat_out=20),
            word_features=10, region_features=14, answers=9,
        ),
        mcan_batch=(3, 8, 6),
        bart=BartConfig(
            vocab_size=40, hidden=16, encoder_layers=1, decoder_layers=1, encoder_heads=2,
            decoder_heads=2, encoder_mlp=24, decoder_mlp=24, positions=32,
        ),
        bart_batch=(2, 12, 9),
        llama=LlamaConfig(vocab_size=40, hidden=16, layers=1, heads=4, kv_heads=2, mlp=24),
        llama_batch=(1, 20),
        matmul=64,
    )  # fmt: skip


@pytest.fixture
def models_bench(fresh_cache, short_readings, monkeypatch):
    """The module of the models bench, on one core: threads would wait for each other most of the time.

    Weights are drawn: initializers would be half of what is compiled.
    """
    import torch
    from flax import nnx

    from tests.bench import models, our_side, runner, timing
    from tests.drawn_weights import drawn

    monkeypatch.setenv("MMQA_PROGRESS", "off")
    monkeypatch.setenv("MMQA_CACHE", str(fresh_cache))
    monkeypatch.setattr(timing, "_PAUSE", 0)
    monkeypatch.setattr(runner, "_PROBE", 128)
    monkeypatch.setattr(
        our_side, "initial", lambda build: drawn(lambda: build(nnx.Rngs(), dtype="float32"))
    )
    cores, threads = os.sched_getaffinity(0), torch.get_num_threads()
    os.sched_setaffinity(0, {min(cores)})
    yield models
    os.sched_setaffinity(0, cores)
    torch.set_num_threads(threads)


def test_models_rows_compare_the_same_work(models_bench, monkeypatch):
    """And a row whose sides differ stops the bench. What a bare machine lacks is not imported.

    Of the rows, which one function makes, BERT's alone has sides in bfloat16, and of those with
    dropout VLP's is left out.
    """
    built, build, load = [], models_bench.cases, builtins.__import__
    names = tuple(name for name in models_bench.ROWS if name != "vlp_train_dropout")

    def watched(name, globals=None, *rest):
        ours = (globals or {}).get("__name__", "").startswith(("mmqa_jax.", "tests."))
        assert not (ours and name.partition(".")[0] in ABSENT), name
        return load(name, globals, *rest)

    def cases(suite, wanted):
        assert wanted == names
        without = dataclasses.replace(suite, left_out=("ours_bfloat16", "peer_bfloat16"))
        others = tuple(name for name in names if name != "bert")
        for case in itertools.chain(build(suite, ("bert",)), build(without, others)):
            built.append(case)
            yield case

    monkeypatch.setattr(models_bench, "cases", cases)
    with monkeypatch.context() as patch:
        patch.setattr(builtins, "__import__", watched)
        result = models_bench.run_suite(tiny(), Options(rounds=2, only=names))
    assert result["bench"] == "models"
    assert result["threads"] == 1
    rows = {row["name"]: row for row in result["rows"]}
    assert list(rows) == ["matmul", *names]
    slow_in_torch, low_is_slow = (
        any(said.startswith(f"{side}_bfloat16") for said in result["left_out"])
        for side in ("peer", "ours")
    )
    for name, row in rows.items():
        assert row.keys() >= COLUMNS
        assert row["unit"] == "ms"
        low, high = row["ratio_range"]
        assert low <= row["ratio"] <= high
        if name in ("matmul", "bert"):
            assert (row.get("peer_bfloat16", 0) > 0) is not slow_in_torch
            assert "ours_bfloat16" in row or low_is_slow
        else:
            assert "peer_bfloat16" not in row  # there is none of ours to compare it with
        assert name == "matmul" or row["of_xla_matmul"] > 0
        if name != "matmul" and not name.endswith("_dropout"):
            assert row["deviation"] < 2e-5, row
    # The peak is the fastest of all products of squares, so these cannot surpass it.
    assert rows["matmul"]["of_peak"] <= 1
    assert rows["matmul"]["peer_of_peak"] <= 1
    # A step with dropout is another step.
    assert 2e-5 < rows["mcan_train_dropout"]["deviation"] < 0.1

    bert = next(case for case in built if case.name == "bert")
    broken = dataclasses.replace(bert, ours=lambda: bert.ours().at[0, 0, 0].add(0.05))
    monkeypatch.setattr(models_bench, "cases", lambda suite, wanted: iter([broken]))
    with pytest.raises(RunError, match=r"bert: results differ by 0\.0"):
        models_bench.run_suite(tiny(), Options(rounds=1))


def test_rows_follow_from_what_was_timed():
    from tests.bench.runner import Case, row_of

    class Peak:
        best = 1e9

    seconds = {"ours": [0.5, 0.2, 0.1], "peer": [0.5, 0.3, 0.4], "ours_bfloat16": [0.1] * 3}
    case = Case("bert", "ms", None, flops=1e8, read_bytes=1000, notes={"work": "some"})
    assert row_of(case, seconds, Peak(), 5000.0) == {
        "name": "bert", "ours": 200.0, "peer": 400.0, "ratio": 1.5, "unit": "ms", "floor": 200.0,
        "work": "some", "ratio_range": [1.0, 4.0], "gflops": 0.5, "of_peak": 0.5,
        "peer_of_peak": 0.25, "ours_bfloat16": 100.0,
    }  # fmt: skip
    case = Case("decode", "tokens/s", None, count=10, read_bytes=100)
    row = row_of(case, {"ours": [0.2]}, None, 1000.0)
    assert (row["ours"], row["floor"], row["of_floor"]) == (50.0, 100.0, 0.5)
    memory = Case("load", "MiB", 200, 300, notes={"of_p": 1.5})
    assert row_of(memory, {}) == {
        "name": "load", "ours": 200, "peer": 300, "ratio": 1.5, "unit": "MiB", "floor": None,
        "of_p": 1.5,
    }  # fmt: skip
    assert row_of(Case("scann", "queries/s", 200, 100), {})["ratio"] == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "required: NAME"),
        (["modles"], "argument NAME: invalid choice: 'modles'.*models.*convert"),
        (["convert", "--only=lod"], "--only=lod: no such row; use one of .*load"),
        (["convert", "--rounds=0"], "--rounds=0: at least 1 was expected"),
        (["convert", "--size=huge"], "--size: invalid choice: 'huge'"),
        (["convert", "--data=x"], "--data=x: .* generates its data; leave it out"),
    ],
)
def test_wrong_commands(arguments, message, capsys):
    assert main(arguments) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert re.fullmatch(f"tests.bench: .*{message}.*\n", printed.err)


def test_the_verb_names_the_new_command(refused):
    refused("bench", "models", message="mmqa bench: is `python -m tests.bench` now")


def test_parsers_are_measured_beside_ours():
    from tests.bench.parsers import license_of, run

    rows = run(Options(rounds=1, only=("text",)))["rows"]
    assert [row["name"] for row in rows] == ["text: ours", "text: decoded"]
    assert {(row["of_held"], row["words"], row["failed"]) for row in rows} == {(1.0, 1.0, None)}
    assert rows[0]["letters"] == rows[1]["letters"] > 1000
    assert all(row["peak_mib"] > 5 for row in rows)
    assert license_of("lxml") == "BSD-3-Clause"


@pytest.mark.parametrize("form", ["csv", "docx", "odt", "pptx", "xlsx"])
def test_samples_of_the_parsers_trial_are_read_by_ours(form):
    module = importlib.import_module(f"tests.bench.parsers.{form}")
    for name, data in module.SAMPLES().items():
        document = READERS[ending_of(name)].read(data)
        assert document.letters_read > 20, name
        assert document.missing == 0, name
