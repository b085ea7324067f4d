"""`mmqa run` interrupted and started again: only what is missing is computed."""

import shutil
from pathlib import Path

import pytest
from cli_runs import done, mmqa, rows_of
from row_runs import row_flags

from mmqa_jax.core.files import read_json
from mmqa_jax.core.store import Store, chunks_of, read_head
from mmqa_jax.inference.reader import Reader
from mmqa_jax.inference.reranker import Reranker
from mmqa_jax.retrieval.dense import DenseRetriever

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quiet")]

ROW = "webqa:clip20_vlp"  # with a retriever, a reranker and a reader
RESULTS = ("predictions.jsonl", "per_question.jsonl", "scores.json", "report.html")
METHODS = {"reader": (Reader, "answer_batches"), "reranker": (Reranker, "score_batches")}


@pytest.fixture(scope="module")
def flags_of(data, models, index):
    return lambda name, workdir: row_flags(name, workdir, data, models, index)


@pytest.fixture(scope="module")
def counted_whole(flags_of, tmp_path_factory):
    """The workdir of a run that nothing interrupted, and the sizes of its batches."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    with pytest.MonkeyPatch.context() as patch:
        counted = count(patch)
        done(*flags_of(ROW, folder))
    return folder, counted


@pytest.fixture(scope="module")
def whole(counted_whole):
    """The workdir of a run that nothing interrupted."""
    return counted_whole[0]


def interrupt(patch: pytest.MonkeyPatch, part: str, *, after: int) -> None:
    """Ctrl-C after so many batches of a part."""
    owner, name = METHODS[part]
    original = getattr(owner, name)

    def batches(self, *arguments):
        for number, batch in enumerate(original(self, *arguments)):
            if number == after:
                raise KeyboardInterrupt
            yield batch

    patch.setattr(owner, name, batches)


def count(patch: pytest.MonkeyPatch) -> dict[str, list[int]]:
    """Part -> how many questions or pairs each of its batches holds from now on."""
    counted: dict[str, list[int]] = {"retriever": [], "reranker": [], "reader": []}
    sizes = {"reader": len, "reranker": lambda batch: len(batch.indices)}

    def counting(part, original):
        def batches(self, *arguments):
            for batch in original(self, *arguments):
                counted[part].append(sizes[part](batch))
                yield batch

        return batches

    for part, (owner, name) in METHODS.items():
        patch.setattr(owner, name, counting(part, getattr(owner, name)))
    search = DenseRetriever.search

    def counted_search(self, questions, top_k):
        counted["retriever"].append(len(questions))
        return search(self, questions, top_k)

    patch.setattr(DenseRetriever, "search", counted_search)
    return counted


def results_of(folder: Path, part: str) -> dict:
    """What a run has kept of a part's results."""
    (journal,) = (folder / "journals").glob(f"{part}-*")
    store = Store(journal, read_head(journal)["job"])
    return {key: store[key] for key in store}


def same_results(folder: Path, whole: Path) -> None:
    """All but the times."""
    for name in ("predictions.jsonl", "retrieval/candidates.jsonl", "retrieval/relevance.jsonl"):
        assert (folder / name).read_bytes() == (whole / name).read_bytes(), name
    assert read_json(folder / "scores.json") == read_json(whole / "scores.json")
    rows, others = rows_of(folder / "per_question.jsonl"), rows_of(whole / "per_question.jsonl")
    for row, other in zip(rows, others, strict=True):
        assert row.pop("seconds") > 0
        other.pop("seconds")
        assert row == other


def test_what_a_whole_run_computes(counted_whole):
    """The batches that the tests below count the rest of."""
    _, counted = counted_whole
    # The modality of every question is known: four of text (of 8 snippets), one of 3 pictures.
    assert sum(counted["retriever"]) == 5
    assert sum(counted["reranker"]) == 4 * 8 + 3
    assert max(counted["reranker"]) == 8
    assert counted["reader"] == [4, 1]


@pytest.mark.parametrize("part", ["reader", "reranker"])
def test_a_run_interrupted_between_two_batches(part, flags_of, whole, tmp_path):
    folder = tmp_path / "run"
    with pytest.MonkeyPatch.context() as patch:
        interrupt(patch, part, after=1)
        ended = mmqa(*flags_of(ROW, folder))
    assert ended.code == 130
    assert ended.err.endswith("interrupted; start the same command again to continue.\n")
    assert not any((folder / name).exists() for name in RESULTS)
    kept = results_of(folder, part)
    assert len(kept) == {"reader": 4, "reranker": 8}[part]  # its first batch
    with pytest.MonkeyPatch.context() as patch:
        counted = count(patch)
        done(*flags_of(ROW, folder))
    assert counted["retriever"] == []
    assert sum(counted["reranker"]) == {"reader": 0, "reranker": 35 - 8}[part]
    assert sum(counted["reader"]) == {"reader": 1, "reranker": 5}[part]
    same_results(folder, whole)
    assert kept.items() <= results_of(folder, part).items()


def test_the_time_before_the_interrupt_counts(flags_of, tmp_path):
    folder = tmp_path / "run"
    with pytest.MonkeyPatch.context() as patch:
        interrupt(patch, "reader", after=1)
        mmqa(*flags_of("atlas:oracle", folder))
    kept = results_of(folder, "reader")
    spent = {key.split()[0]: seconds for key, (_, seconds) in kept.items()}
    assert len(spent) == 4
    done(*flags_of("atlas:oracle", folder))
    for row in rows_of(folder / "per_question.jsonl"):
        if row["question_id"] in spent:
            assert row["seconds"] == round(spent[row["question_id"]], 6)


@pytest.mark.parametrize("part", ["reader", "reranker"])
def test_a_batch_cut_by_a_kill(part, flags_of, whole, tmp_path):
    """The half of a batch that was on its way to disk is computed again."""
    folder = tmp_path / "run"
    shutil.copytree(whole, folder)
    for name in RESULTS:
        (folder / name).unlink()
    (file,) = (folder / "journals").glob(f"{part}-*/[0-9]*.jsonl")
    *_, last = chunks_of(file)
    file.write_bytes(file.read_bytes()[:-9])
    with pytest.MonkeyPatch.context() as patch:
        counted = count(patch)
        done(*flags_of(ROW, folder))
    assert counted == {"retriever": [], "reranker": [], "reader": [], part: [len(last.keys)]}
    same_results(folder, whole)


def test_a_damaged_journal(flags_of, whole, refused, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(whole, folder)
    (file,) = (folder / "journals").glob("reader-*/[0-9]*.jsonl")
    lines = file.read_text().splitlines(keepends=True)
    lines[2] = '["a ri\n'
    file.write_text("".join(lines))
    message = r"journals/reader-\w+/[\w-]+\.jsonl: is damaged .*; remove it, and its work is done"
    refused(*flags_of(ROW, folder), message=message)
    file.unlink()
    done(*flags_of(ROW, folder))
    same_results(folder, whole)


def test_a_model_trained_anew_is_asked_again(flags_of, models, tmp_path):
    """Answers of the weights that were there before do not count."""
    model, folder = tmp_path / "answer", tmp_path / "run"
    shutil.copytree(models / "answer", model)
    flags = (*flags_of("atlas:oracle", folder), f"--config.parts.reader.model={model}")
    done(*flags)
    config = (model / "config.json").read_text()
    assert '"started": "20' in config
    (model / "config.json").write_text(config.replace('"started": "20', '"started": "21'))
    with pytest.MonkeyPatch.context() as patch:
        counted = count(patch)
        done(*flags)
    assert counted["reader"] == [4, 1]


def test_an_index_built_anew_is_searched_again(flags_of, index, tmp_path):
    """One of another kind, over the same embeddings."""
    folder, copied = tmp_path / "run", tmp_path / "index"
    shutil.copytree(index, copied)
    retriever = "--config.parts.retriever."
    of_copy = (f"{retriever}index={copied}", f"{retriever}index_kind=any")
    flags = (*flags_of("webqa:clip2", folder), *of_copy)
    flags = (*flags, "--config.parts.retriever.modality=unknown")
    done(*flags)
    manifest = read_json(copied / "index" / "manifest.json")
    assert manifest["kind"] == "exact"
    done("index", f"--embeddings={copied}", "--kind=scann")
    with pytest.MonkeyPatch.context() as patch:
        counted = count(patch)
        done(*flags)
    assert counted["retriever"] == [5]
