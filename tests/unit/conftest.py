"""Fixtures of several files; what is expensive is made once for all of them."""

from __future__ import annotations

import functools
import re
from pathlib import Path

import hypothesis
import pytest
from cli_runs import (
    LANDS,
    QUESTIONS,
    TINY_OF,
    done,
    mmqa,
    question,
    quietly,
    train_flags,
    tree,
    write_documents,
)

# In its first test Hypothesis reads the constants of the whole package, which a busy machine makes "too slow".
hypothesis.settings.register_profile(
    "mmqa_jax", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("mmqa_jax")


@pytest.fixture(scope="session", autouse=True)
def _measured_once():
    """`mmqa plan` measures this machine once, reading 32 MiB of its memory and not a GiB.

    Whichever verb measures products multiplies 320 rows and not 3,200.
    """
    from mmqa_jax.core import host
    from mmqa_jax.plan import topology

    measure, read = topology._measured, functools.partial(host.read_bandwidth, 32 << 20)

    @functools.cache
    def measured(*device):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(host, "read_bandwidth", read)
            return measure(*device)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(topology, "_measured", measured)
        patch.setattr(host, "_ROWS", 320)
        yield


@pytest.fixture(scope="session")
def engine():
    """The engine of tiny_llm. What was asked of it before changes no answer of it."""
    from tiny_llm import make_engine

    return make_engine()


@pytest.fixture
def backend(engine):
    """A new backend over it: nothing is counted yet."""
    from tiny_llm import tiny_backend

    return tiny_backend(engine)


@pytest.fixture(scope="module")
def quiet(cli_cache):
    """How the verbs run during the tests of a file."""
    with quietly(cli_cache):
        yield


@pytest.fixture
def refused(tmp_path):
    """Runs a verb that must refuse its input: one sentence, exit 2, nothing left in tmp_path."""

    def run(*arguments: str | Path, message: str) -> None:
        before = tree(tmp_path)
        ended = mmqa(*arguments)
        assert ended.code == 2, ended.err
        assert ended.out == ""
        # Where a model is used is said before its inputs are read.
        said = re.sub(r"(?m)^[\w.]+: \d+ devices?.* a batch\n", "", ended.err)
        assert re.fullmatch(r"mmqa: .+[.?]\n", said), ended.err
        assert re.search(message, ended.err), ended.err
        assert tree(tmp_path) == before

    return run


@pytest.fixture(scope="session")
def data(made_once):
    """The prepared tiny corpus."""

    def prepare(folder: Path) -> None:
        raw = write_documents(folder / "raw", QUESTIONS)
        result = done("prepare", "corpus", f"--raw={raw}", f"--out={folder / 'data'}")
        assert result["data"] == str(folder / "data")

    return made_once("corpus", prepare) / "data"


@pytest.fixture(scope="session")
def bare_data(tmp_path_factory):
    """A prepared corpus of which no question lists a source or an answer."""
    folder = tmp_path_factory.mktemp("bare")
    bare = {"positives": [], "negatives": [], "answers": [], "keywords": ""}
    rows = [question(n, s, land, **bare) for s in ("train", "test") for n, land in enumerate(LANDS)]
    raw = write_documents(folder / "raw", rows)
    done("prepare", "corpus", f"--raw={raw}", f"--out={folder / 'data'}")
    return folder / "data"


@pytest.fixture(scope="session")
def models(data, cli_cache, made_once):
    """A run of each task, trained by `mmqa train`."""

    def train(folder: Path) -> None:
        with quietly(cli_cache):
            for task in TINY_OF:
                flags = train_flags(task, data, folder / task, **{"train.checkpoint_every": 2})
                result = done("train", *flags, initializers=True)
                assert result.pop("goodput")["attempts"] == 1
                assert result == {"task": task, "steps": 2, "workdir": str(folder / task)}

    return made_once("runs", train)


@pytest.fixture(scope="session")
def index(data, models, cli_cache, made_once):
    """Embeddings and index of the tiny corpus."""

    def embed(folder: Path) -> None:
        out = folder / "index"
        flags = (f"--data={data}", f"--model={models / 'contrastive'}", f"--out={out}")
        with quietly(cli_cache):
            result = done("embed", *flags)
            assert result.items() >= {"sources": 11, "dim": 32, "broken_pictures": 0}.items()
            assert result["mesh"] == {"data": result["devices"], "fsdp": 1, "tensor": 1}
            # A second time nothing is left to do.
            before = tree(out / "embeddings")
            assert done("embed", *flags) == result
            assert tree(out / "embeddings").keys() == before.keys()
            assert done("index", f"--embeddings={out}", "--kind=exact")["rows"] == 11

    return made_once("index", embed) / "index"


@pytest.fixture(scope="session")
def bm25(data, cli_cache, tmp_path_factory):
    """Rankings of the test questions by `mmqa search --method=bm25`."""
    path = tmp_path_factory.mktemp("bm25") / "bm25.jsonl"
    with quietly(cli_cache):
        result = done("search", f"--data={data}", "--method=bm25", f"--out={path}")
    assert result["questions"] == 5
    # Capital questions name their land; the flag question has its picture's caption in it.
    assert result["recall"]["recall@1"] == 1.0
    return path


@pytest.fixture
def wrong(data, models, index, bm25, tmp_path):
    """Working flags of the verbs that read models and files, for one of them to go wrong."""
    out = f"--out={tmp_path / 'out'}"
    corpus = f"--data={data}"
    contrastive, embeddings = f"--model={models / 'contrastive'}", f"--index={index}"
    return {
        "embed": ["embed", corpus, contrastive, out],
        "index": ["index", f"--embeddings={index}"],
        "search": ["search", corpus, "--method=dense", contrastive, embeddings, out],
        "rerank": ["rerank", corpus, f"--model={models / 'rerank'}", f"--candidates={bm25}", out],
        "answer": ["answer", corpus, f"--model={models / 'answer'}", f"--sources={bm25}", out],
        "evaluate": ["evaluate", "corpus", f"--references={data}", f"--predictions={bm25}"],
    }
