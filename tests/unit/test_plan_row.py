"""`mmqa plan` of a row of a paper's table: its parts, hours on each chip, money."""

import json

import numpy as np
import pytest

from mmqa_jax.core.chips import CHIPS
from mmqa_jax.core.chunks import Job, Shard
from mmqa_jax.core.chunks import Part as ChunkPart
from mmqa_jax.core.config import load_config
from mmqa_jax.core.errors import UserError
from mmqa_jax.plan.program import least_time, trace_program
from mmqa_jax.plan.programs import make_program
from mmqa_jax.plan.row import Done, is_row, plan_row, read_prices, row_counts
from mmqa_jax.plan.topology import open_topology
from mmqa_jax.retrieval.embeddings import write_embeddings
from mmqa_jax.runs.verbs.plan import finished_work
from tests.refusals import refuses

pytestmark = pytest.mark.slow

ROW = "configs/webqa/tables.py:clip20_vlp"
QUESTIONS, SOURCES = 5_000, 1_000_000


@pytest.fixture(scope="module")
def row():
    config = load_config(ROW)
    assert is_row(config)
    return plan_row(config, open_topology("v5e-8"), None, (QUESTIONS, SOURCES), {"v5e": 2.0})


def test_a_row_is_the_sum_of_its_parts(row):
    made = row.to_json()
    work = {part["name"]: part["work"] for part in made["parts"]}
    assert work == {
        "embed sources": SOURCES,
        "embed questions": QUESTIONS,
        "search": QUESTIONS,
        "rerank": QUESTIONS * 20,  # options.top_k
        "answer": QUESTIONS,
    }
    assert [part["name"] for part in made["parts"] if part["once"]] == ["embed sources"]
    hours = sum(part["hours_bound"] for part in made["parts"] if not part["once"])
    v5e = made["chips"]["v5e"]
    assert v5e["chip_hours_bound"] == pytest.approx(8 * hours)
    of_all = v5e["chip_hours_bound"] + v5e["once_chip_hours_bound"]  # none of it is made
    assert v5e["price"] == pytest.approx(2 * of_all)
    assert made["chips"]["h200"]["price"] is None
    assert set(made["chips"]) == set(CHIPS)
    assert json.dumps(made)


def test_a_part_takes_what_its_own_config_does(row):
    place = open_topology("v5e:2x4")
    program = make_program("rerank", load_config("configs/webqa/vlp_select.py"), place.devices)
    bound = least_time(trace_program(program, place.placement(program.placed)), place.chip)
    (rerank,) = [part for part in row.parts if part.name == "rerank"]
    calls = QUESTIONS * 20 / program.examples
    assert row.hours(rerank) == pytest.approx(calls * bound.seconds / 3600)


def test_more_devices_share_the_work_and_take_as_many_chip_hours():
    config = load_config(ROW)
    few, many = (
        plan_row(config, open_topology(name), None, (QUESTIONS, SOURCES), {})
        for name in ("v5e:2x4", "v5e:4x4")
    )
    for one, other in zip(few.parts, many.parts, strict=True):
        assert few.hours(one) == pytest.approx(2 * many.hours(other))


def test_a_language_model_reads_and_writes():
    config = load_config("configs/okvqa/tables.py:pica_full")
    place = open_topology("v5e-8")
    planned = plan_row(config, place, "llama2_7b", (100, 1), {"h100": 3.0})
    assert any(part.traced.exchanges for part in planned.parts)  # over links, which no GPU has
    assert planned.price("h100") == 3 * planned.chip_hours(CHIPS["h100"], once=False) > 0
    tokens = {part.name: part.work for part in planned.parts if part.key == "parts.llm"}
    calls, new = 100 * config.options.ensemble, config.options.max_new_tokens
    assert tokens == {"decode": calls * new, "prefill": calls * (1024 - new)}
    assert "parts.library" in planned.on_host
    with pytest.raises(UserError, match=r"--model is missing: .*davinci-002.*--model=llama2_7b"):
        plan_row(config, place, None, (100, 1), {})


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--questions=0", "--sources=10"], r"--questions=0: at least 1 was expected; correct it"),
        (
            ["--questions=9"],
            r"--questions and --sources: data/webqa .* not on this machine; give b",
        ),
        (
            ["--questions=9", "--sources=1M,2M"],
            r"--sources=1M,2M: a row has one number .* give one",
        ),
        (
            ["--questions=9", "--sources=9", "--workdir={tmp}"],
            r"--workdir=.*no workdir of `mmqa run`",
        ),
        (["--search"], r"--search: is no flag of a row; leave it out"),
        (
            ["--prices=nowhere.toml"],
            r"--prices=nowhere\.toml: expected a TOML .*\[chip_hour\].*copy",
        ),
        (
            ["--prices={unknown}"],
            r"\[chip_hour\] v9 is no chip that plan knows; use one of v4, v5e",
        ),
        (["--prices={negative}"], r"\[chip_hour\] h200 is -1, a number from 0 on .*; correct it"),
        (["--prices={text}"], r"\[chip_hour\] h200 is 'dear', a number from 0 on .*; correct it"),
    ],
)
def test_bad_input(flags, message, refused, tmp_path):
    for name, line in (("unknown", "v9 = 1"), ("negative", "h200 = -1"), ("text", "h200 = 'dear'")):
        (tmp_path / name).write_text(f"[chip_hour]\n{line}\n")
    files = {name: tmp_path / name for name in ("unknown", "negative", "text")} | {"tmp": tmp_path}
    refused("plan", f"--config={ROW}", *(flag.format(**files) for flag in flags), message=message)


def test_flags_of_a_row_belong_to_rows(refused):
    message = r"--questions, --prices and --workdir: are a row's; .*leave them out"
    for flag in ("--questions=3", "--workdir=runs/row"):
        refused("plan", "--config=configs/webqa/vlp_select.py", flag, message=message)


def test_what_is_done_takes_no_time(row):
    config, place = load_config(ROW), open_topology("v5e-8")
    done = plan_row(config, place, None, (QUESTIONS, SOURCES), {"v5e": 2.0}, Done(QUESTIONS, 10**9))
    assert [part.done for part in done.parts] == [part.work for part in done.parts]
    assert done.price("v5e") == 0
    half = plan_row(config, place, None, (QUESTIONS, SOURCES), {"v5e": 2.0}, Done(QUESTIONS // 2))
    for one, whole in zip(half.parts, row.parts, strict=True):
        share = 1 if whole.once else 2  # no source is in the index
        assert share * half.hours(one) == pytest.approx(row.hours(whole))
    once, each = (half.chip_hours(CHIPS["v5e"], once=once) for once in (True, False))
    assert half.price("v5e") == pytest.approx(2 * (once + each))


def test_what_is_finished_is_looked_for(tmp_path):
    index, workdir = tmp_path / "clip", tmp_path / "row"
    config = load_config(ROW, {"parts.retriever.index": str(index)})
    assert finished_work(config, None) == Done(0, 0)
    for part, done in ((0, 6), (1, 10)):
        write_embeddings(
            index / "embeddings",
            lambda span: np.ones((len(span), 4), np.float32),
            **{"rows": 10, "dim": 4, "shard_rows": 4, "part": (part, 2)},
            **{"model_fingerprint": "m", "corpus_fingerprint": "c"},
        )
        assert finished_work(config, None) == Done(0, done)
    workdir.mkdir()
    (workdir / "config.json").write_text(json.dumps({"config": {"row": "clip20_vlp"}}))
    assert finished_work(config, workdir) == Done(0, 10)
    with Job(workdir / "parts", {"verb": "run"}, 7, chunk=3, shard=Shard(2, 3)) as job:
        job.run(lambda: lambda chunk: ChunkPart([{}] * len(chunk)))
    assert finished_work(config, workdir) == Done(1, 10)
    (workdir / "scores.json").write_text(json.dumps({"questions": 7, "scores": {}}))
    assert finished_work(config, workdir) == Done(7, 10)
    with config.unlocked():
        config.row = "vlp"
    refuses(r"holds the row clip20_vlp, and the config is of vlp", finished_work, config, workdir)


def test_the_table_of_prices_that_is_shipped_names_no_price():
    assert read_prices(None) == {}


def test_questions_of_a_prepared_corpus(tmp_path):
    config = load_config(ROW, {"data.dir": str(tmp_path)})
    assert row_counts(config, 5, 7) == (5, 7)
    refuses(r"holds no corpus\.json.*mmqa prepare", row_counts, config, 5, None)


def test_a_folder_that_no_config_made():
    config = load_config(ROW, {"parts.reranker.model": "weights/other"})
    message = r"parts\.reranker\.model=weights/other: the row does not say .*; plan that config"
    with pytest.raises(UserError, match=message):
        plan_row(config, open_topology("v5e-8"), None, (5, 7), {})
