"""Every inference verb, killed (kill -9) at random moments, most of them shared by processes.

Its files are those of one process that nobody disturbed, to the bit: in the file system, and with
all inputs and results in an object store (tests/object_store.py). By default each verb is killed
once; with --kills=50 all verbs together at least 50 times. What is to be killed is a fork; what ends
a job, or is not disturbed, runs in this process.
"""

import functools
import os
import random
import shutil
import signal
from pathlib import Path

import killed_verbs
import object_store
import pytest
from cli_runs import ROOT, Ended, done, mmqa, quietly, rows_of
from row_runs import row_flags
from test_cli_candidates import whole_run_flags
from test_cli_caption import caption_flags, write_captioner
from tiny_llm import SIZES, write_folder
from vqa_files import write_okvqa

from mmqa_jax.core.files import read_json
from mmqa_jax.core.local_copies import local_copy
from mmqa_jax.core.paths import as_path
from mmqa_jax.runs.jobs import find_job, job_status
from tests.forks import server

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quiet")]

SHARED = ("embed", "prompt", "run")
IN_RUN = ("search", "rerank", "answer")  # stages of a row too, in its chunks: with --kills=50
ALONE = ("index", "caption")  # one process does all of the job
AT_ONCE = ("candidates",)  # nothing of it is kept before its end: with --kills=50
# Files that name times or hosts, what is kept of finished work, and locks.
NOT_COMPARED = ("config.json", "report.html", ".lock", ".claim")


@pytest.fixture(scope="module")
def kills(request):
    """How often each verb is killed."""
    return -(-request.config.getoption("--kills") // len(SHARED + ALONE))


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """The objects of a store's bucket."""
    folder = tmp_path_factory.mktemp("store") / "all"
    with pytest.MonkeyPatch.context() as patch, object_store.started(folder, patch):
        yield object_store.Objects(folder / object_store.BUCKET)


@pytest.fixture(scope="module")
def start(cli_cache, store):
    """Starts a verb that is killed at a moment; returns how it ended."""
    environment = {"MMQA_CACHE": str(cli_cache), "MMQA_PROGRESS": "off", "JAX_PLATFORMS": "cpu"}

    def run(argv, kill_at: int) -> Ended:
        command = [killed_verbs.__file__, str(kill_at), *map(str, argv)]
        fork = server().start(command, os.environ | environment)
        said, _ = fork.communicate()
        assert fork.returncode in (0, -signal.SIGKILL), said
        return Ended(fork.returncode, "", said)

    return run


@pytest.fixture(scope="module")
def captioner(tmp_path_factory):
    folder = tmp_path_factory.mktemp("oscar")
    write_captioner(folder)
    return folder


@pytest.fixture(scope="module")
def prophet(cli_cache, made_once):
    """A benchmark's data, and a model of it, whose candidates are wanted."""

    def begin(folder: Path) -> None:
        done("prepare", "okvqa", f"--raw={write_okvqa(folder / 'raw')}", f"--out={folder / 'data'}")
        with quietly(cli_cache):
            done(*whole_run_flags(folder / "run", folder / "data"), "--only_start")

    return made_once("prophet", begin)


@pytest.fixture(scope="module")
def flags_of(data, models, index, bm25, tmp_path_factory, request):
    """Verb, folder -> its flags, in chunks of two or three."""
    folder = tmp_path_factory.mktemp("inputs")
    model = write_folder(folder / "model")
    prompts = folder / "prompts.txt"
    prompts.write_text("The capital\nThe flag\nWhy\nSeven days\nThe\n")
    sizes = ("slots", "length", "buckets", "prefill_tokens")
    engine = [f"--config.engine.{name}={getattr(SIZES, name)}" for name in sizes]

    def flags(verb: str, out: Path) -> list:
        corpus, contrastive = f"--data={data}", f"--model={models / 'contrastive'}"
        file = f"--out={out / 'out.jsonl'}"
        if verb == "index":
            if not out.exists():
                shutil.copytree(index / "embeddings", out / "embeddings")
            return ["index", f"--embeddings={out}", "--kind=exact"]
        if verb == "caption":
            return caption_flags(request.getfixturevalue("captioner"), out)
        if verb == "candidates":
            made = request.getfixturevalue("prophet")
            paths = (f"--data={made / 'data'}", f"--model={made / 'run'}", f"--out={out}")
            return ["candidates", *paths]
        return {
            "embed": ["embed", corpus, contrastive, f"--out={out}", "--chunk=3"],
            "search": [
                "search", corpus, "--method=dense", contrastive, f"--index={index}", file,
                "--chunk=2",
            ],
            "rerank": [
                "rerank", corpus, f"--model={models / 'rerank'}", "--candidates=restricted",
                f"--retriever={models / 'contrastive'}", f"--index={index}", file, "--chunk=2",
            ],
            "answer": [
                "answer", corpus, f"--model={models / 'answer'}", f"--sources={bm25}", file,
                "--chunk=2",
            ],
            "prompt": [
                "prompt", f"--prompts={prompts}", f"--model={model}", file,
                f"--config={ROOT / 'configs/prompt/default.py'}", *engine,
                "--config.decoding.max_new_tokens=4", "--config.decoding.logprobs=True",
                f"--cache={out / 'cache.sqlite'}", "--chunk=2",
            ],
            "run": [*row_flags("webqa:clip20_vlp", out, data, models, index), "--chunk=2"],
        }[verb]  # fmt: skip

    return flags


@pytest.fixture(scope="module")
def undisturbed(quiet, store, flags_of, tmp_path_factory):
    """Verb -> the files of one process that nobody disturbs, and how many moments it has."""

    @functools.cache
    def run(verb: str) -> tuple[dict[str, bytes | list], int]:
        whole = tmp_path_factory.mktemp(verb) / "whole"
        moments = killed_verbs.Moments()
        with moments.watched():
            ended = mmqa(*flags_of(verb, whole))
        assert ended.code == 0, ended.err
        return results(whole), moments.count

    return run


def results(folder: Path) -> dict[str, bytes | list]:
    """The files of a job, without those that name times and without its parts."""
    found: dict[str, bytes | list] = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        kept = any(part in name for part in ("parts", "shards-", "journals", ".tmp"))
        if path.is_dir() or kept or name.endswith(NOT_COMPARED) or "sqlite" in name:
            continue
        if path.name == "per_question.jsonl":
            found[name] = [{**row, "seconds": None} for row in rows_of(path)]
        else:
            found[name] = path.read_bytes()
    return found


def test_killed_shards_end_with_the_files_of_one_process(
    shared, start, flags_of, undisturbed, kills, tmp_path
):
    verb, rng = shared, random.Random(f"{shared} {kills}")
    folder = tmp_path / "shared"
    expected, moments = undisturbed(verb)
    assert len(expected) >= (4 if verb == "run" else 1)
    flags, died = flags_of(verb, folder), 0
    while died < kills:
        # Other processes go on from the finished chunks. A single kill is of a process that does all, and
        # half-way: some chunks are done and some are not.
        shards = 1 if kills == 1 else rng.choice((1, 2, 3))
        shard = f"--shard={rng.randrange(shards)}/{shards}"
        share = moments // shards
        ended = start([*flags, shard], share // 2 if kills == 1 else rng.randint(1, share))
        died += ended.code < 0
        if kills == 1:
            status = job_status(find_job(folder / "out.jsonl" if verb == "prompt" else folder))
            (own,) = status["shards"]
            assert 0 < own["parts_done"] < own["parts"]
        # A file is there whole, or it is not there.
        for name, content in results(folder).items():
            if name in expected and name != "embeddings/manifest.json":
                assert content == expected[name], name
        if ended.code == 0 and complete(folder):
            shutil.rmtree(folder)
    for index in range(2):
        ended = mmqa(*flags, f"--shard={index}/2")
        assert ended.code == 0, ended.err
    assert results(folder) == expected
    assert not [*folder.rglob("*.tmp")]


def pytest_generate_tests(metafunc):
    many = metafunc.config.getoption("--kills") >= 50
    if "shared" in metafunc.fixturenames:
        metafunc.parametrize("shared", SHARED + IN_RUN if many else SHARED)
    if "scheme" in metafunc.fixturenames:
        cases = [("embed", "gs")]
        if many:
            cases += [("prompt", "s3"), ("run", "gs"), ("search", "s3")]
            cases += [("rerank", "gs"), ("answer", "s3")]
        metafunc.parametrize(("verb", "scheme"), cases)
    elif "verb" in metafunc.fixturenames:
        metafunc.parametrize("verb", ALONE + AT_ONCE if many else ALONE)


def test_killed_shards_in_an_object_store(
    verb, scheme, start, store, flags_of, undisturbed, kills, data, models, index
):
    """The data, the models and the index are in the store too."""
    rng = random.Random(f"{verb} in a store {kills}")
    expected, moments = undisturbed(verb)
    expected, bucket = dict(expected), f"{scheme}://{object_store.BUCKET}"
    inputs = {"data": data, "contrastive": models / "contrastive", "index": index}
    inputs |= {name: models / name for name in ("rerank", "answer")}
    for name, folder in inputs.items():
        for file in filter(Path.is_file, folder.rglob("*")):
            store.put(f"{name}/{file.relative_to(folder)}", file.read_bytes())
        # embed.json names them.
        place, moved = str(folder).encode(), f"{bucket}/{name}".encode()
        for key, content in expected.items():
            if isinstance(content, bytes):
                expected[key] = content.replace(place, moved)

    def flags(out: Path | str) -> list:
        found = [str(flag) for flag in flags_of(verb, as_path(out)) if "--cache=" not in str(flag)]
        for name, folder in inputs.items():
            found = [flag.replace(str(folder), f"{bucket}/{name}") for flag in found]
        return found

    out, died = f"{bucket}/results-{verb}", 0
    while died < min(kills, 2):
        shard = f"--shard={rng.randrange(2)}/2"
        ended = start([*flags(out), shard], kill_at=rng.randint(1, moments // 2))
        died += ended.code < 0
    for shard in range(2):
        ended = mmqa(*flags(out), f"--shard={shard}/2")
        assert ended.code == 0, ended.err
    assert results(local_copy(out)) == expected
    assert not [name for name in store.names(f"results-{verb}") if ".lock/" in name]


def test_killed_jobs_end_with_the_files_of_an_undisturbed_one(
    verb, start, flags_of, undisturbed, kills, tmp_path
):
    rng = random.Random(f"{verb} {kills}")
    folder = tmp_path / "killed"
    expected, moments = undisturbed(verb)
    assert len(expected) > len(results(folder))
    died = 0
    while died < kills:
        ended = start(flags_of(verb, folder), kill_at=rng.randint(1, moments))
        died += ended.code < 0
        found = results(folder)
        assert all(found[name] == expected[name] for name in found.keys() & expected.keys())
        if found == expected:
            shutil.rmtree(folder)
    ended = mmqa(*flags_of(verb, folder))
    assert ended.code == 0, ended.err
    assert results(folder) == expected
    assert not [*folder.rglob("*.tmp")]


def complete(folder: Path) -> bool:
    """Whether a shared job's results are written."""
    jobs = [*folder.rglob("job.json")]
    if jobs:
        return all(read_json(path).get("complete") for path in jobs)  # none before the first end
    manifests = [*folder.glob("embeddings/manifest.json")]
    return bool(manifests) and all(read_json(path)["complete"] for path in manifests)
