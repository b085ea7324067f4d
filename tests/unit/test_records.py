"""ArrayRecord through TFDS: the same corpus back, whole or not at all, without TensorFlow."""

import json
import pickle
import subprocess
import sys

import pytest

from mmqa_jax.core.errors import RunError, UserError
from mmqa_jax.data.corpus import Corpus, open_corpus
from mmqa_jax.data.pictures.decode import PictureError
from mmqa_jax.data.records import corpus_records
from mmqa_jax.data.schema import Question, Source
from tests.pictures import plain
from tests.refusals import refuses


def png(level):
    return plain((level % 256, 7, 9))


def corpus_of(size):
    """Every third source is a picture; texts hold what JSON and UTF-8 stumble on."""
    sources = [
        Source(f"s{i}", "image", f"Bild {i} äß", image=f"p/{i}")
        if i % 3 == 0
        else Source(
            f"s{i}", "text", f'"quoted" \u2028 \x00 {i} 🚩', "Title", extra={"n": [i, None]}
        )
        for i in range(size)
    ]
    questions = [
        Question(f"q{i}", ("test", "train")[i % 2], f"Which {i}?", positives=(f"s{i}",))
        for i in range(size)
    ]
    return sources, questions


def read_picture(name):
    return png(int(name.rpartition("/")[2]))


def write(out, size=20, **options):
    sources, questions = corpus_of(size)
    options = {"name": "toy", **options}
    return corpus_records.write_records(out, sources, questions, read_picture, **options)


def test_everything_comes_back_in_order(tmp_path, monkeypatch):
    monkeypatch.setattr(corpus_records, "TEXT_SHARD", 7)  # several files, and batches across them
    monkeypatch.setattr(corpus_records, "PICTURE_SHARD", 3)
    monkeypatch.setattr(corpus_records, "READ_BATCH", 6)
    write(tmp_path / "out", 50)
    assert len(list((tmp_path / "out").glob("records-*/sources/*.array_record-*"))) == 8
    corpus = open_corpus(tmp_path / "out")
    sources, questions = corpus_of(50)
    assert corpus.sources == sources
    assert corpus.questions("train") == [q for q in questions if q.split == "train"]
    assert corpus.questions("test") == [q for q in questions if q.split == "test"]
    assert corpus.questions("val") == []
    assert corpus.row["s49"] == 49
    assert corpus.modality_rows("image") == list(range(0, 50, 3))
    for row in (48, 0, 27, 1):
        assert corpus.picture(row) == (png(row) if row % 3 == 0 else None)


@pytest.mark.slow
def test_no_tensorflow_and_no_jax(tmp_path):
    """The whole way in a fresh interpreter, where nothing else could have imported them."""
    program = (
        "import sys\n"
        "from mmqa_jax.data.records import corpus_records as records\n"
        "from mmqa_jax.data.corpus import open_corpus\n"
        "from mmqa_jax.data.schema import Source\n"
        "assert 'tensorflow_datasets' not in sys.modules\n"
        f"records.write_records({str(tmp_path / 'o')!r}, [Source('a', 'text', 'b')], [], name='n')\n"
        f"assert open_corpus({str(tmp_path / 'o')!r}).sources == [Source('a', 'text', 'b')]\n"
        "assert 'tensorflow_datasets' in sys.modules\n"
        "print([m for m in ('tensorflow', 'jax') if m in sys.modules])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr


def test_corpus_goes_to_worker_processes(tmp_path):
    write(tmp_path / "out")
    corpus = open_corpus(tmp_path / "out")
    assert corpus.picture(3) == png(3)  # its files are open now
    copy = pickle.loads(pickle.dumps(corpus))
    assert copy.picture(6) == png(6)
    assert copy.sources == corpus.sources


def test_fingerprint_follows_texts_pictures_and_questions(tmp_path):
    sources, questions = corpus_of(6)

    def fingerprint(name, sources=sources, questions=questions, read=read_picture):
        made = corpus_records.write_records(tmp_path / name, sources, questions, read, name=name)
        return made["fingerprint"]

    first = fingerprint("a")
    assert fingerprint("b") == first
    others = {
        fingerprint("c", [*sources[:-1], Source("s5", "text", "other")]),
        fingerprint("d", questions=questions[:-1]),
        fingerprint("e", read=lambda name: png(99)),
        fingerprint("f", sources[::-1]),
    }
    assert len(others | {first}) == 5


def test_a_failed_write_leaves_the_old_corpus(tmp_path):
    out = tmp_path / "out"
    write(out)

    def fails(name):
        if name == "p/6":
            raise OSError("disk on fire")
        return read_picture(name)

    sources, questions = corpus_of(10)
    with pytest.raises(OSError, match="fire"):
        corpus_records.write_records(out, sources, questions, fails, name="new", overwrite=True)
    corpus = open_corpus(out)
    assert (len(corpus), corpus.manifest["name"], corpus.picture(6)) == (20, "toy", png(6))
    assert len(list(out.iterdir())) == 2  # manifest and records, nothing half-written


@pytest.mark.slow
def test_killed_in_the_middle_and_prepared_again(tmp_path):
    out = tmp_path / "out"
    program = (
        "import os, signal, sys; sys.path.insert(0, {here!r})\n"
        "import test_records as t\n"
        "def read(name):\n"
        "    if name == 'p/9': os.kill(os.getpid(), signal.SIGKILL)\n"
        "    return t.read_picture(name)\n"
        "t.corpus_records.write_records({out!r}, *t.corpus_of(20), read, name='toy')\n"
    ).format(here=str(__file__).rpartition("/")[0], out=str(out))
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == -9
    refuses(r"holds no corpus\.json, so it is not a finished corpus", open_corpus, out)
    write(out)
    assert len(open_corpus(out)) == 20
    assert len(list(out.iterdir())) == 2


def test_a_corpus_is_not_replaced_unasked(tmp_path):
    out = tmp_path / "out"
    write(out)
    refuses("already holds a prepared corpus", write, out, 5)
    (out / "notes.txt").write_text("mine")
    for size in (5, 5):  # the second is the same corpus again
        write(out, size, overwrite=True)
        assert len(open_corpus(out)) == size
        assert len(list(out.glob("records-*"))) == 1
    assert (out / "notes.txt").read_text() == "mine"


def test_missing_or_damaged_folder_says_how_to_make_it(tmp_path):
    refuses(r"nowhere: no such folder.*mmqa prepare", open_corpus, tmp_path / "nowhere")
    refuses(r"holds no corpus\.json.*mmqa prepare", open_corpus, tmp_path)
    write(tmp_path)
    (folder,) = tmp_path.glob("records-*")
    names = (folder / "pictures.json").read_text()
    (folder / "pictures.json").write_text("{}")
    refuses(r"pictures\.json: a list of names .*mmqa prepare", open_corpus, tmp_path)
    (folder / "pictures.json").write_text(names)
    (folder / "questions").rename(tmp_path / "elsewhere")
    refuses(r"questions: its .* records cannot be read.*mmqa prepare", open_corpus, tmp_path)
    folder.rename(tmp_path / "gone")
    refuses(r"corpus\.json: its records are incomplete.*mmqa prepare", open_corpus, tmp_path)
    (tmp_path / "corpus.json").write_text(json.dumps({"format": 0}))
    refuses(r"corpus\.json: not a manifest of format 1", open_corpus, tmp_path)


def test_wrong_input(tmp_path):
    sources, questions = corpus_of(4)

    def check(message, *arguments):
        refuses(message, corpus_records.write_records, tmp_path / "out", *arguments, name="toy")
        assert not (tmp_path / "out" / "corpus.json").exists()

    check("toy: the corpus is empty", [], questions)
    (tmp_path / "out").touch()
    check("out: is a file, a folder to write to was expected; name another", sources, questions)
    (tmp_path / "out").unlink()
    check("source id 's0' appears twice", [*sources, sources[0]], questions, read_picture)
    check("question id 'q1' appears twice", sources, [*questions, questions[1]], read_picture)
    check("question q: split is 'dev'", sources, [Question("q", "dev", "?")], read_picture)
    check("no picture files were given", sources, questions)


def test_broken_pictures_default_limit_is_ten_or_one_percent(tmp_path):
    def breaks(how_many):
        def read(name):
            number = int(name.rpartition("/")[2]) // 3
            if number < how_many:
                raise PictureError(f"{name}: rotten")
            return read_picture(name)

        return read

    sources, questions = corpus_of(60)
    out = tmp_path / "ten"
    manifest = corpus_records.write_records(out, sources, questions, breaks(10), name="n")
    assert manifest["counts"]["broken_pictures"] == 10
    assert manifest["counts"]["pictures"] == 10
    corpus = open_corpus(out)
    assert [corpus.sources[row].image for row in (27, 30)] == [None, "p/30"]
    assert corpus.picture(30) == png(30)  # numbers of the kept pictures do not shift
    with pytest.raises(RunError, match=r"11 pictures cannot be decoded, more than the 10 .*p/30"):
        corpus_records.write_records(tmp_path / "eleven", sources, questions, breaks(11), name="n")


def test_candidates_of_a_question_from_another_corpus():
    sources, _ = corpus_of(4)
    corpus = Corpus(sources)
    question = Question("q", "test", "?", positives=("s2",), negatives=("s0", "s3"))
    assert corpus.candidates(question) == [2, 0, 3]
    assert corpus.positive_rows(question) == [2]
    with pytest.raises(UserError, match=r"question q: its source 'far' is not in the corpus"):
        corpus.candidates(Question("q", "test", "?", positives=("far",)))


def test_progress_ends_at_the_total(tmp_path):
    steps = []
    write(tmp_path, 300, progress=lambda done, total: steps.append((done, total)))
    total = 100 + 300 + 300  # pictures, sources, questions
    assert steps == [(256, total), (512, total), (total, total)]
