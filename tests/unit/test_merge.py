"""`mmqa merge`: a folder of parts is data, whoever it comes from."""

import json
import os

import numpy as np
import pytest
from cli_runs import done, mmqa, rows_of
from row_runs import row_flags

from mmqa_jax.core.chunks import JobRecord, Part, read_job, write_job
from mmqa_jax.core.store import Store, chunk_files, chunks_of
from mmqa_jax.retrieval.embeddings import write_embeddings
from mmqa_jax.runs.stages import Answered

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quiet")]


@pytest.fixture
def parts(data, tmp_path):
    """The parts of a search by two shards."""
    out = tmp_path / "found.jsonl"
    flags = ["search", f"--data={data}", "--method=bm25", f"--out={out}", "--chunk=2"]
    for index in range(2):
        done(*flags, f"--shard={index}/2")
    out.unlink()
    return tmp_path / "found.jsonl.parts"


@pytest.fixture
def row(data, tmp_path):
    """The workdir of a row, whose results are deleted."""
    folder = tmp_path / "row"
    for index in range(2):
        flags = row_flags("atlas:bm25", folder, data, data, data)
        done(*flags, "--chunk=2", f"--shard={index}/2")
    for name in ("scores.json", "predictions.jsonl", "report.html"):
        (folder / name).unlink()
    return folder


def older(folder, command) -> None:
    """Makes job.json one of an earlier version, which held the command."""
    record = read_job(folder)
    content = {"job": record.job, "command": command, "complete": False}
    (folder / "job.json").write_text(json.dumps(content))


def rewrite(folder, number: int, change) -> None:
    """Replaces the rows of a part, with a checksum that fits."""
    store, key = Store(folder, read_job(folder).job), f"{number:05d}"
    (chunk,) = chunks_of(part_path(folder, number))
    value = store[key]
    rows = [change(row) for row in value["rows"]]
    store.add({key: {**value, "rows": rows}}, alone=True, notes=chunk.notes)


def part_path(folder, number: int):
    return folder / f"{number:05d}.jsonl"


def test_where_the_models_of_a_row_ran():
    """The last parts say; those of a start whose answers were all kept ones name no engine."""
    one, two = ({"reader.model": {"devices": n}} for n in (1, 2))
    notes = [
        {"llm": {}, "engine": {"slots": 4}, "serving": one | {"reranker.model": {"devices": 1}}},
        {"llm": {}, "engine": None, "serving": two},
        {"llm": {}},  # of an earlier version
    ]
    answered = Answered.of([Part([], of_part) for of_part in notes])
    assert answered.engine == {"slots": 4}
    assert answered.serving == {"reader.model": {"devices": 2}, "reranker.model": {"devices": 1}}
    assert Answered.of([Part([], {"llm": {}})]).serving == {}


def test_the_config_file_of_a_folder_is_not_executed(row, tmp_path):
    evil = tmp_path / "evil.py"
    evil.write_text(f"open({str(tmp_path / 'executed')!r}, 'w').write('')\n")
    given = {"verb": "run", "config": str(evil), "workdir": str(row), "overrides": []}
    older(row / "parts", {**given, "shard": "merge"})
    assert done("merge", row)["questions"] == 5
    assert (row / "scores.json").exists()
    assert not (tmp_path / "executed").exists()


def test_names_in_job_json_lead_nowhere(parts, tmp_path):
    """Neither --out nor any other recorded path is used."""
    other = tmp_path / "elsewhere.jsonl"
    older(parts, {"verb": "search", "out": str(other), "data": "/", "shard": "merge"})
    assert done("merge", parts) == {"out": str(tmp_path / "found.jsonl"), "rows": 5}
    assert not other.exists()
    assert len(rows_of(tmp_path / "found.jsonl")) == 5


def test_names_in_rows_become_no_files(row, refused):
    def climb(line):
        return {**line, "rankings": {"../../climbed": line["rankings"]["candidates"]}}

    for number in range(3):
        rewrite(row / "parts", number, climb)
    refused("merge", row, message="parts do not hold what `mmqa run` writes .ValueError: rankings")
    assert not [*row.parent.rglob("climbed*")]
    assert not (row / "scores.json").exists()


def test_parts_with_other_questions_are_refused(row, refused):
    def ask_another(line):
        return {**line, "prediction": {**line["prediction"], "question_id": "another"}}

    rewrite(row / "parts", 0, ask_another)
    message = "row: its parts answer other questions; start the job again in another place"
    refused("merge", row, message=message)


@pytest.mark.parametrize("name", ["job.json", "00001.jsonl"])
def test_links_out_of_a_folder_are_not_followed(name, parts, tmp_path, refused):
    secret = tmp_path / "secret"
    os.replace(parts / name, secret)
    (parts / name).symlink_to(secret)
    refused("merge", parts, message=f"{parts / name}: is a symbolic link, which a job's folder")


def test_a_folder_of_parts_is_no_link(parts, tmp_path, refused):
    moved = tmp_path / "theirs.parts"
    os.replace(parts, moved)
    parts.symlink_to(moved)
    refused("merge", tmp_path / "found.jsonl", message="found.jsonl.parts: is a symbolic link")


def test_embeddings_are_not_joined_through_links(tmp_path, refused):
    """Neither the folder, nor its shards', nor a shard leads to others' files."""

    def job(folder) -> None:
        with pytest.raises(KeyboardInterrupt):
            write_embeddings(
                folder, embed, rows=4, dim=2, shard_rows=2, model_fingerprint="m",
                corpus_fingerprint="c",
            )  # fmt: skip

    def embed(rows: range) -> np.ndarray:
        if rows.start:
            raise KeyboardInterrupt
        return np.ones((len(rows), 2), np.float32)

    (tmp_path / "out").mkdir()
    job(tmp_path / "theirs")
    (tmp_path / "out" / "embeddings").symlink_to(tmp_path / "theirs")
    refused("merge", tmp_path / "out", message="out/embeddings: is a symbolic link")
    (tmp_path / "out" / "embeddings").unlink()
    job(tmp_path / "out" / "embeddings")
    (shards,) = (tmp_path / "out" / "embeddings").glob("shards-*")
    (shards / "00001.jsonl").symlink_to(shards / "00000.jsonl")
    refused("merge", tmp_path / "out", message="00001.jsonl: is a symbolic link")
    os.replace(shards, tmp_path / "away")
    shards.symlink_to(tmp_path / "away")
    refused("merge", tmp_path / "out", message="shards-.*: is a symbolic link")


@pytest.mark.parametrize("name", [".lock", ".claim"])
def test_locks_write_into_no_other_file(name, parts, tmp_path):
    theirs = tmp_path / "theirs"
    theirs.write_text("precious")
    (parts / name).unlink(missing_ok=True)
    (parts / name).symlink_to(theirs)
    ended = mmqa("merge", parts)
    assert (ended.code, theirs.read_text()) == (2, "precious")
    assert "Traceback" not in ended.err


def test_a_row_is_written_into_its_own_folder(row, tmp_path, refused):
    (tmp_path / "away").mkdir()
    for file in (row / "retrieval").iterdir():
        file.unlink()
    (row / "retrieval").rmdir()
    (row / "retrieval").symlink_to(tmp_path / "away")
    refused("merge", row, message="retrieval: is a symbolic link")
    assert not [*(tmp_path / "away").iterdir()]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"verb": "os"}, "is of no verb that makes parts, but 'os'"),
        ({"verb": ["run"]}, "is of no verb that makes parts"),
        ({"verb": "run"}, "holds parts of `mmqa run`, which lie in W/parts"),
        ({"verb": "rerank"}, "parts are missing"),
        ({"items": 10**15}, "job.json: is not a job's"),
        ({"items": "5"}, "job.json: is not a job's"),
        ({"chunk": 0}, "job.json: is not a job's"),
        ({"items": 1}, "00000.jsonl: is a part of another run"),
    ],
)
def test_jobs_that_there_are_not(changed, message, parts, refused):
    record = read_job(parts)
    if message == "parts are missing":
        chunk_files(parts)[0].unlink()
    write_job(parts, JobRecord({**record.job, **changed}, record.shards, record.code))
    refused("merge", parts, message=message)


def test_rows_of_another_kind(parts, refused):
    rewrite(parts, 1, lambda line: [line])
    refused("merge", parts, message="its parts do not hold what `mmqa search` writes .TypeError")


def test_answers_of_another_kind(row, refused):
    def numbered(line):
        return {**line, "prediction": {**line["prediction"], "answer": 5}}

    for number in range(3):
        rewrite(row / "parts", number, numbered)
    refused("merge", row, message="a prediction holds 5 as its answer")


def test_scores_of_other_data_are_refused(row, refused):
    config = json.loads((row / "config.json").read_text())
    config["config"]["data"]["split"] = "train"
    del config["fingerprint"]
    (row / "config.json").write_text(json.dumps(config))
    refused("merge", row, message="holds another set of questions than was answered in")


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_what_is_no_file_is_refused(make, parts, refused):
    """Nothing would ever come out of a pipe."""
    part_path(parts, 1).unlink()
    make(part_path(parts, 1))
    for verb in ("merge", "status"):
        refused(verb, parts, message="00001.jsonl: is no file; delete it, and the job writes it")


def test_an_edited_part_is_refused(parts, refused):
    path = part_path(parts, 1)
    path.write_text(path.read_text().replace('"sources": ["', '"sources": ["x'))
    refused(
        "merge",
        parts,
        message="00001.jsonl: is damaged .its SHA-256 is another.; delete it and start --shard=1",
    )
