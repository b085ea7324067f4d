"""Pictures written by several threads, and gone on with after a kill: the same bytes in the end."""

import os
import textwrap
from pathlib import Path

import pytest

from mmqa_jax.core.errors import RunError, UserError
from mmqa_jax.data.corpus import open_corpus
from mmqa_jax.data.pictures.decode import PictureError
from mmqa_jax.data.records import corpus_records
from mmqa_jax.data.schema import Question, Source
from tests.forks import OwnForkServer
from tests.pictures import plain
from tests.refusals import refuses

COUNT, SHARD = 22, 4
SOURCES = [Source(f"s{n}", "image", f"Caption {n}", image=f"p/{n}") for n in range(COUNT)]
QUESTIONS = [Question("q", "test", "Which?", positives=("s1",))]


def png(level):
    return plain((level, 7, 9), (3 + level, 3))


def number_of(name):
    return int(name.rpartition("/")[2])


def read(name):
    return png(number_of(name))


def write(out, read=read, inputs="first", **options):
    options = {"name": "toy", "workers": 2, **options}
    return corpus_records.write_records(out, SOURCES, QUESTIONS, read, inputs=inputs, **options)


def contents(out):
    """Every file below a folder, hidden ones too."""
    files = (path for path in sorted(out.rglob("*")) if path.is_file())
    return {str(path.relative_to(out)): path.read_bytes() for path in files}


class Reads:
    """A reader that remembers what it read, and may fail at one picture."""

    def __init__(self, fails_at=None, error=None):
        self.numbers, self.fails_at, self.error = [], fails_at, error

    def __call__(self, name):
        if number_of(name) == self.fails_at:
            raise self.error
        self.numbers.append(number_of(name))
        return read(name)


@pytest.fixture(autouse=True)
def small_shards(monkeypatch):
    monkeypatch.setattr(corpus_records, "PICTURE_SHARD", SHARD)


@pytest.fixture
def whole(tmp_path):
    """What an uninterrupted writer leaves."""
    write(tmp_path / "whole", workers=1)
    return contents(tmp_path / "whole")


@pytest.fixture(scope="module")
def run():
    """Runs a program on these tests' corpus in a process of its own, whose strings hash otherwise."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONHASHSEED", "1")
        modules = ("pytest", "mmqa_jax.data.records.corpus_records", "tensorflow_datasets")
        server = OwnForkServer(modules, os.environ | {"JAX_PLATFORMS": "cpu"})

    def start(program, out):
        head = f"""
            import os, signal, sys
            sys.path.insert(0, {str(Path(__file__).parent)!r})
            import test_picture_records as t
            t.corpus_records.PICTURE_SHARD = t.SHARD
            out = {str(out)!r}
        """
        return server.start(["-c", textwrap.dedent(head) + textwrap.dedent(program)], os.environ)

    yield start
    server.close()


def code_of(fork):
    """Its exit code, once it has ended; pytest shows what it said, should the code be another."""
    print(fork.communicate()[0])
    return fork.returncode


@pytest.mark.slow
def test_the_same_bytes_in_every_process(whole, run, tmp_path):
    assert code_of(run(f"assert hash('a') != {hash('a')}; t.write(out)", tmp_path / "out")) == 0
    assert contents(tmp_path / "out") == whole


def test_any_number_of_threads_writes_the_same_bytes(whole, tmp_path):
    assert sum("pictures-corpus.array_record" in name for name in whole) == 6
    for workers in (3, 8):
        write(tmp_path / str(workers), workers=workers)
        assert contents(tmp_path / str(workers)) == whole


@pytest.mark.slow
def test_killed_among_the_pictures_and_gone_on_with(whole, run, tmp_path):
    program = """
        def read(name):
            if name == "p/13":
                os.kill(os.getpid(), signal.SIGKILL)
            return t.read(name)
        t.write(out, read, workers=1)
    """
    out = tmp_path / "out"
    assert code_of(run(program, out)) == -9
    refuses(r"holds no corpus\.json", open_corpus, out)
    assert any(name.endswith(".tmp") for name in contents(out))  # the shard at which it was
    again, steps = Reads(), []
    write(out, again, progress=lambda done, total: steps.append((done, total)))
    assert sorted(again.numbers) == list(range(12, COUNT))
    assert contents(out) == whole
    assert steps[-1] == (COUNT + COUNT + 1,) * 2


@pytest.mark.slow
def test_killed_among_the_rows_and_gone_on_with(whole, run, tmp_path):
    program = """
        def progress(done, total):
            if done == total:  # all rows are written, the manifest is not
                os.kill(os.getpid(), signal.SIGKILL)
        t.write(out, progress=progress)
    """
    out = tmp_path / "out"
    assert code_of(run(program, out)) == -9
    again = Reads()
    write(out, again)
    assert again.numbers == []
    assert contents(out) == whole


def test_other_inputs_start_afresh(whole, tmp_path):
    for number, changed in enumerate(({"inputs": "second"}, {"inputs": None})):
        out = tmp_path / str(number)
        refuses("disk full", write, out, Reads(13, OSError("disk full")), workers=1, error=OSError)
        again = Reads()
        write(out, again, **changed)
        assert sorted(again.numbers) == list(range(COUNT))
        assert contents(out) == whole


def test_a_failure_keeps_whole_shards_and_nothing_else(whole, tmp_path):
    out = tmp_path / "out"
    refuses("disk full", write, out, Reads(2, OSError("disk full")), workers=1, error=OSError)
    assert contents(out) == {}
    with pytest.raises(KeyboardInterrupt):
        write(out, Reads(9, KeyboardInterrupt()), workers=1)
    assert sum("pictures-corpus" in name for name in contents(out)) == 2
    again = Reads()
    write(out, again)
    assert sorted(again.numbers) == list(range(8, COUNT))
    assert contents(out) == whole


def test_a_shard_that_was_cut_is_written_again(whole, tmp_path):
    out = tmp_path / "out"
    refuses("disk full", write, out, Reads(13, OSError("disk full")), workers=1, error=OSError)
    shard = next(out.rglob("pictures-corpus.array_record-00001"))
    shard.write_bytes(shard.read_bytes()[:-5])
    again = Reads()
    write(out, again, workers=1)
    assert again.numbers == [*range(4, 8), *range(12, COUNT)]
    assert contents(out) == whole


def rotten(*numbers):
    def reads(name):
        if number_of(name) in numbers:
            raise PictureError(f"{name}: rotten")
        return read(name)

    return reads


def test_broken_pictures_of_an_earlier_attempt_count(tmp_path):
    out, bad = tmp_path / "out", (1, 4, 5, 6, 7, 14)  # 4 to 7 are a whole shard
    with pytest.raises(RunError, match=r"6 pictures cannot be decoded, more than the 5 allowed"):
        write(out, rotten(*bad), workers=1, max_broken_pictures=5)
    with pytest.raises(RunError, match=r"6 pictures .*p/1, p/4, p/5, p/6, p/7, p/14"):
        write(out, rotten(*bad), workers=1, max_broken_pictures=5)
    manifest = write(out, rotten(*bad), max_broken_pictures=6)
    assert list(manifest["broken_pictures"]) == [f"p/{n}" for n in bad]
    corpus = open_corpus(out)
    for row in range(COUNT):
        assert corpus.picture(row) == (None if row in bad else png(row))
    write(tmp_path / "whole", rotten(*bad), workers=1, max_broken_pictures=6)
    assert contents(out) == contents(tmp_path / "whole")


@pytest.mark.slow
def test_two_processes_do_not_write_into_each_other(run, tmp_path):
    out, held = tmp_path / "out", tmp_path / "held"
    os.mkfifo(held)
    program = f"""
        def read(name):
            if name == "p/0":
                open({str(held)!r}).read()
            return t.read(name)
        t.write(out, read, workers=1)
    """
    first = run(program, out)
    refused = pytest.raises(UserError, match=r"incomplete: process .* is at work there; w")
    with open(held, "w"), refused:  # once the first reads there, until the end of this block
        write(out)
    assert code_of(first) == 0
    assert len(open_corpus(out)) == COUNT
