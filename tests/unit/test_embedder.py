"""Embedding jobs: equal to one text at a time, and the same file after any interruption."""

import functools
import os
import shutil
import signal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mmqa_jax.core.chunks import MOST_PARTS
from mmqa_jax.core.errors import UserError
from mmqa_jax.core.files import read_json, write_json
from mmqa_jax.data.schema import Source
from mmqa_jax.models.bert.network import Bert, BertConfig, bert_tiny
from mmqa_jax.models.common.array_layout import restacked, unstacked
from mmqa_jax.models.encoders.dual_encoder import DualEncoder, DualEncoderConfig
from mmqa_jax.models.encoders.heads import SentenceEncoder
from mmqa_jax.models.two_towers.config import VisionConfig
from mmqa_jax.retrieval.embedder import (
    Embedder,
    batches_by_length,
    make_encode_source,
    make_encode_text,
)
from mmqa_jax.retrieval.embeddings import (
    join_embeddings,
    open_embeddings,
    read_unfinished,
    write_embeddings,
)
from mmqa_jax.retrieval.text_encoder import length_buckets, load_two_towers
from mmqa_jax.weights.folder import describe_model
from mmqa_jax.weights.registry import architecture
from tests.drawn_weights import drawn
from tests.forks import server
from tests.refusals import refuses

pytestmark = pytest.mark.slow

SIDE, DIM, VOCABULARY = 4, 6, 40
BUCKETS = (4, 8, 12)


class FakeTokenizer:
    """One token per word: 3 + its length; ids 0, 1, 2 are pad, cls, sep."""

    pad_id, before, after, fingerprint = 0, [1], [2], "fake"

    def encode_batch(self, texts):
        return [[3 + len(word) for word in text.split()] for text in texts]


class FakeDual(nnx.Module):
    """Order-sensitive, and blind to padding only if the mask is right."""

    def __init__(self, seed=0):
        rng = np.random.default_rng(seed)
        self.table, self.positions, self.pixels = (
            nnx.Param(jax.device_put(rng.normal(size=(rows, DIM)).astype(np.float32)))
            for rows in (VOCABULARY, BUCKETS[-1], SIDE * SIDE * 3)
        )

    def _text(self, ids, mask):
        x = self.table[...][ids] + self.positions[...][: ids.shape[1]]
        return jnp.tanh((jnp.tanh(x) * mask[..., None]).sum(1))

    def _image(self, pixels):
        return jnp.tanh(pixels.reshape(len(pixels), -1) / 255 @ self.pixels[...])

    def encode_text(self, ids, mask):
        return _unit(self._text(ids, mask))

    def encode_image(self, pixels):
        return _unit(self._image(pixels))

    def encode_source(self, ids, mask, pixels, has_image):
        return _unit(self._text(ids, mask) + self._image(pixels) * has_image[:, None])


def _unit(x):
    norm = np.linalg.norm if isinstance(x, np.ndarray) else jnp.linalg.norm
    return x / norm(x, axis=-1, keepdims=True)


class FakeCorpus:
    def __init__(self, count=70, seed=0):
        rng = np.random.default_rng(seed)
        self.sources = []
        for row in range(count):
            text = " ".join("x" * n for n in rng.integers(1, 20, rng.integers(0, 14)))
            modality = "image" if row % 3 == 0 else "text"
            image = f"{row}.png" if modality == "image" else None
            self.sources.append(Source(str(row), modality, text, title="yy", image=image))
        self.fingerprint = "corpus-1"


class FakePictures:
    """Row 9's picture is broken; `fail_at` stops the job as a crash would."""

    size = SIDE

    def __init__(self, fail_at=None):
        self.fail_at, self.asked = fail_at, []

    def pixels(self, row):
        if row == self.fail_at:
            raise KeyboardInterrupt
        self.asked.append(row)
        return None if row == 9 else picture(row)


def picture(seed):
    return np.random.default_rng(seed).integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8)


def embedder(model=None, **options):
    graphdef, state = nnx.split(model or FakeDual())
    options = {"image_size": SIDE, "buckets": BUCKETS, "batch_size": 16, **options}
    return Embedder(graphdef, state, FakeTokenizer(), **options)


@functools.cache
def shared():
    """One embedder for many tests: compiling it is what takes time."""
    return embedder()


def plain_text(model, text):
    """One text at a time, no padding: [DIM], not normalized."""
    ids = [1, *[3 + len(word) for word in text.split()][: BUCKETS[-1] - 2], 2]
    x = np.asarray(model.table[...])[ids] + np.asarray(model.positions[...])[: len(ids)]
    return np.tanh(np.tanh(x).sum(0))


def plain_image(model, pixels):
    return np.tanh(pixels.reshape(-1) / 255 @ np.asarray(model.pixels[...]))


def plain_sources(model, corpus):
    vectors = []
    for row, source in enumerate(corpus.sources):
        vector = plain_text(model, f"yy {source.text}")
        if source.modality == "image" and row != 9:
            vector = vector + plain_image(model, picture(row))
        vectors.append(_unit(vector))
    return np.stack(vectors)


def files(folder):
    return sorted(path.name for path in folder.iterdir() if path.name != ".lock")


@pytest.mark.parametrize("count", [1, 8, 9, 45])
def test_questions_equal_one_at_a_time(count):
    model = FakeDual()
    texts = [source.text for source in FakeCorpus(count).sources]
    vectors = shared().embed_questions(texts)
    expected = [_unit(plain_text(model, text)) for text in texts]
    np.testing.assert_allclose(vectors, expected, atol=2e-6)


def test_question_with_a_picture_is_the_mean_of_both():
    model = FakeDual()
    vectors = shared().embed_questions(["a bb", "ccc", "d"], [None, picture(1), picture(2)])
    expected = [_unit(plain_text(model, text)) for text in ("a bb", "ccc", "d")]
    for i in (1, 2):
        expected[i] = _unit((expected[i] + _unit(plain_image(model, picture(i)))) / 2)
    np.testing.assert_allclose(vectors, expected, atol=2e-6)


@pytest.mark.parametrize(("shard_rows", "batch_size"), [(25, 16), (1000, 4)])
def test_sources_equal_one_at_a_time(tmp_path, shard_rows, batch_size):
    model, corpus = FakeDual(), FakeCorpus()
    seen = []
    embeddings = embedder(model, batch_size=batch_size).embed_sources(
        corpus,
        FakePictures(),
        tmp_path / "e",
        shard_rows=shard_rows,
        on_progress=lambda done, total: seen.append((done, total)),
    )
    np.testing.assert_allclose(embeddings.vectors, plain_sources(model, corpus), atol=2e-6)
    assert isinstance(embeddings.vectors, np.memmap)
    assert seen[-1] == (70, 70)
    assert files(tmp_path / "e") == ["SHA256SUMS", "embeddings.npy", "manifest.json"]


def test_the_real_dual_encoder(tmp_path):
    """Snippets, captioned and broken pictures as `encode_source` gives them one by one."""
    text = BertConfig(vocab_size=VOCABULARY, hidden=DIM, layers=1, heads=2, mlp=8)
    sizes = {"width": 8, "layers": 1, "heads": 2, "mlp_width": 8, "embed_dim": DIM}
    vision = VisionConfig(image_size=SIDE, patch_size=2, **sizes)
    model = drawn(lambda: DualEncoder(DualEncoderConfig(text, vision), rngs=nnx.Rngs()))
    corpus = FakeCorpus(12)
    made = embedder(model, batch_size=8).embed_sources(corpus, FakePictures(), tmp_path / "e")
    graphdef, state = nnx.split(model)
    encode = jax.jit(lambda state, *given: nnx.merge(graphdef, state).encode_source(*given))
    for row in (0, 1, 3, 9):
        ids = [1, *FakeTokenizer().encode_batch([f"yy {corpus.sources[row].text}"])[0][:10], 2]
        padded = np.array([ids + [0] * (12 - len(ids))])
        shown = np.array([row in (0, 3)])
        expected = encode(state, padded, np.arange(12)[None] < len(ids), picture(row)[None], shown)
        np.testing.assert_allclose(made.vectors[row], expected[0], atol=2e-6)


def test_no_recompilation_between_jobs(tmp_path):
    make_encode_text.cache_clear(), make_encode_source.cache_clear()  # those of tests before
    one = embedder()

    def jobs(folder):
        one.embed_sources(FakeCorpus(), FakePictures(), folder / "a", shard_rows=25)
        one.embed_questions(["a"])
        one.embed_sources(FakeCorpus(61, seed=3), FakePictures(), folder / "b", shard_rows=17)
        one.embed_questions(["a b", "c"])
        return one._encode_text._cache_size(), one._encode_source._cache_size()

    compiled = jobs(tmp_path / "first")
    assert jobs(tmp_path / "second") == compiled
    assert max(compiled) <= 2 * len(BUCKETS)  # two batch sizes


def test_texts_that_need_little_padding_share_the_program_of_the_next_length(monkeypatch):
    texts = ["a", "b", "a b c d", "a b c d e f g h"]  # tokens around them: 3, 3, 6 and 10
    one = embedder(batch_size=2)
    apart = np.concatenate([one.embed_texts([text]) for text in texts])
    lengths = []
    run = one._encode_text

    def watched(state, ids, mask):
        lengths.append(ids.shape)
        return run(state, ids, mask)

    monkeypatch.setattr(one, "_encode_text", watched)
    np.testing.assert_allclose(one.embed_texts(texts), apart, atol=2e-6)
    assert [length for _, length in lengths] == [12, 12]
    monkeypatch.setattr("mmqa_jax.retrieval.embedder._PROGRAM_ON_CPU", 8)  # tokens of padding
    np.testing.assert_allclose(one.embed_texts(texts), apart, atol=2e-6)
    assert [length for _, length in lengths[2:]] == [12, 4]  # the two of 3 would have 10 of padding


def test_batches_are_full_and_hold_texts_of_like_length():
    """Of 2,000 texts of 4 to 500 tokens one batch is not full, and padding is a tenth."""
    lengths = np.random.default_rng(0).integers(4, 600, 2000)
    serving = embedder(batch_size=32).serving
    batches = batches_by_length(lengths, length_buckets(500, 8192), serving)
    np.testing.assert_array_equal(np.sort(np.concatenate([b[0] for b in batches])), np.arange(2000))
    assert [len(rows) for rows, _, _ in batches] == [32] * 62 + [16]
    assert all(lengths[rows].max() <= length or length == 500 for rows, length, _ in batches)
    padded = sum(len(rows) * length for rows, length, _ in batches)
    assert padded < 1.1 * np.minimum(lengths, 500).sum()
    longer = batches_by_length([3000] * 5, length_buckets(8192, 8192), serving)
    assert [(len(rows), length, most) for rows, length, most in longer] == [(1, 3072, 1)] * 5


def test_layers_apart_give_the_same_vectors():
    graphdef, state = nnx.split(drawn(lambda: SentenceEncoder(Bert(bert_tiny(), rngs=nnx.Rngs()))))
    apart = unstacked(state)
    assert len(jax.tree.leaves(apart)) > len(jax.tree.leaves(state))
    jax.tree.map(np.testing.assert_array_equal, restacked(apart), state)
    ids, mask = np.arange(24).reshape(2, 12), np.ones((2, 12), bool)
    whole = make_encode_text(graphdef)(state, ids, mask)
    np.testing.assert_allclose(make_encode_text(graphdef)(apart, ids, mask), whole, atol=2e-6)
    text = make_encode_text(graphdef).lower(apart, ids, mask).compile().as_text()
    assert "concatenate(" not in text  # nothing is stacked where it runs


def interrupted(tmp_path, name="e"):
    """A job stopped in its third shard: rows 0..39 of 70 are on disk."""
    pictures = FakePictures(fail_at=45)
    with pytest.raises(KeyboardInterrupt):
        shared().embed_sources(FakeCorpus(), pictures, tmp_path / name, shard_rows=20)
    assert files(shards(tmp_path / name)) == ["00000.jsonl", "00001.jsonl", "job.json"]
    return tmp_path / name


def shards(folder):
    [found] = folder.glob("shards-*")
    return found


def ones(rows):
    return np.ones((len(rows), 2))


def write(folder, embed=ones, *, rows=40, shard_rows=10, **options):
    """A job of vectors of two values."""
    about = {"dim": 2, "model_fingerprint": "m", "corpus_fingerprint": "c"}
    return write_embeddings(folder, embed, rows=rows, shard_rows=shard_rows, **about, **options)


def whole_in(folder):
    shared().embed_sources(FakeCorpus(), FakePictures(), folder, shard_rows=20)
    return (folder / "embeddings.npy").read_bytes()


def cut(file):
    file.write_bytes(file.read_bytes()[:-10])


@pytest.mark.parametrize(
    ("damage", "first_row"),
    [
        (lambda folder: None, 42),
        (lambda folder: (shards(folder) / "00000.jsonl").unlink(), 0),
        (lambda folder: cut(shards(folder) / "00000.jsonl"), 0),
        (lambda folder: (folder / "manifest.json").write_text('{"what": '), 42),
        (lambda folder: (folder / "manifest.json").unlink(), 42),
    ],
)
def test_resumed_file_is_identical(tmp_path, damage, first_row):
    folder = interrupted(tmp_path)
    damage(folder)
    refuses(r"mmqa embed|not valid JSON", open_embeddings, folder)
    pictures = FakePictures()
    shared().embed_sources(FakeCorpus(), pictures, folder, shard_rows=20)
    assert (folder / "embeddings.npy").read_bytes() == whole_in(tmp_path / "whole")
    assert files(folder) == ["SHA256SUMS", "embeddings.npy", "manifest.json"]
    assert min(pictures.asked) == first_row
    assert not any(20 <= row < 40 for row in pictures.asked)
    again = FakePictures()
    shared().embed_sources(FakeCorpus(), again, folder, shard_rows=20)
    assert again.asked == []


def test_unfinished_jobs_are_refused(tmp_path):
    folder = interrupted(tmp_path)
    refuses("2 of 4 parts are missing: 2, 3; start the command again", join_embeddings, folder)
    np.save(shards(folder) / "00002.npy", np.zeros((20, 4), "f4"))
    for go_on in (whole_in, join_embeddings):
        refuses(r"shards-\w+: holds shards of an older version", go_on, folder)


@pytest.mark.parametrize(
    "sizes",
    [
        *({"rows": 0}, {"dim": 0}, {"shard_rows": 0}, {"rows": 40.0}, {"dim": True}),
        {"rows": MOST_PARTS + 1, "shard_rows": 1},
        {"rows": 1 << 50, "dim": 1 << 11, "shard_rows": 1 << 49},
    ],
)
def test_sizes_that_cannot_be_are_refused(tmp_path, sizes):
    """By whoever opens, reports or joins embeddings, before anything is listed or allocated."""
    folder = tmp_path / "e"
    write(folder, part=(0, 2))
    assert read_unfinished(folder).missing == [1, 3]
    refuses("e: 2 of 4 parts are missing: 1, 3; start --shard=1 of 2", join_embeddings, folder)
    manifest = read_json(folder / "manifest.json") | sizes
    for read in (read_unfinished, join_embeddings, open_embeddings):
        write_json(folder / "manifest.json", manifest | {"complete": read is open_embeddings})
        refuses(r"manifest\.json: rows, dim and shard_rows are \[", read, folder)


# Vectors are their row's number. Arguments: folder, row to die at, part, parts.
JOB = """
import os, sys
import numpy as np
from mmqa_jax.retrieval.embeddings import write_embeddings

folder, kill_at, part, parts = sys.argv[1], *map(int, sys.argv[2:])

def embed(rows):
    if rows.start == kill_at:
        os.kill(os.getpid(), 9)
    print(rows.start)
    return np.arange(rows.start, rows.stop)[:, None] * np.ones(3)

made = write_embeddings(folder, embed, rows=95, dim=3, shard_rows=10, part=(part, parts),
                        model_fingerprint="m", corpus_fingerprint="c")
print("waits" if made is None else "complete")
"""


def start_job(folder, kill_at=-1, part=0, parts=1):
    return server().start(["-c", JOB, *map(str, (folder, kill_at, part, parts))], os.environ)


def end_job(job):
    *rows, how = job.communicate()[0].split() or [""]
    return job.returncode, rows, how


def test_processes_share_a_job(tmp_path):
    """Three at a time, one of them killed in its second shard and started again."""
    folder = tmp_path / "e"
    jobs = [
        start_job(folder, kill_at=40 if part == 1 else -1, part=part, parts=3) for part in range(3)
    ]
    first, killed, third = map(end_job, jobs)
    assert first == (0, ["0", "30", "60", "90"], "waits")
    assert killed[0] == -signal.SIGKILL
    assert third == (0, ["20", "50", "80"], "waits")
    refuses("did not finish", open_embeddings, folder)
    assert end_job(start_job(folder, part=1, parts=3)) == (0, ["40", "70"], "complete")
    np.testing.assert_array_equal(open_embeddings(folder).vectors[:, 2], np.arange(95))
    assert files(folder) == ["SHA256SUMS", "embeddings.npy", "manifest.json"]
    # Whoever comes late, or twice, finds it done.
    assert end_job(start_job(folder, part=2, parts=3)) == (0, [], "complete")


def test_all_processes_may_end_at_once(tmp_path):
    """Both see all shards when they end; one array is made, both may open it."""
    for attempt in range(2):
        folder = tmp_path / str(attempt)
        jobs = [start_job(folder, part=part, parts=2) for part in range(2)]
        endings = [end_job(job) for job in jobs]
        assert [code for code, _, _ in endings] == [0, 0]
        assert "complete" in [how for _, _, how in endings]
        np.testing.assert_array_equal(open_embeddings(folder).vectors[:, 0], np.arange(95))


def test_shared_jobs_must_agree(tmp_path):
    share = functools.partial(write, tmp_path / "e")
    assert share(part=(0, 2)) is None
    with pytest.raises(UserError, match="holds embeddings with shard_rows 10, this job's is 20"):
        share(shard_rows=20, part=(1, 2))
    for part in ((2, 2), (-1, 2), (0, 0)):
        refuses(f"part {part[0]} of {part[1]} does not exist", share, part=part)
    assert share(part=(1, 2)).vectors.shape == (40, 2)


def test_another_number_of_processes_goes_on(tmp_path):
    """Of three, one is killed and one never starts; two others, or one, do what they left."""
    begun = tmp_path / "begun"
    assert end_job(start_job(begun, part=0, parts=3)) == (0, ["0", "30", "60", "90"], "waits")
    assert end_job(start_job(begun, kill_at=40, part=1, parts=3))[0] == -signal.SIGKILL
    for later in ([(1, 2), (0, 2)], [(0, 1)]):
        folder = shutil.copytree(begun, tmp_path / str(len(later)))
        computed = []
        for part, parts in later:
            code, rows, how = end_job(start_job(folder, part=part, parts=parts))
            assert code == 0
            computed += rows
        assert how == "complete"
        assert sorted(computed, key=int) == ["20", "40", "50", "70", "80"]
        np.testing.assert_array_equal(open_embeddings(folder).vectors[:, 2], np.arange(95))


def test_embeddings_of_another_model_or_corpus_are_refused(tmp_path):
    first = shared()
    first.embed_sources(FakeCorpus(), FakePictures(), tmp_path / "e")
    other = embedder(FakeDual(seed=1))
    assert other.fingerprint != first.fingerprint
    with pytest.raises(UserError, match="model_fingerprint"):
        other.embed_sources(FakeCorpus(), FakePictures(), tmp_path / "e")
    corpus = FakeCorpus()
    corpus.fingerprint = "corpus-2"
    with pytest.raises(UserError, match="corpus_fingerprint 'corpus-1', this job's is 'corpus-2'"):
        first.embed_sources(corpus, FakePictures(), tmp_path / "e")
    refuses("model_fingerprint is", open_embeddings, tmp_path / "e", other.fingerprint)
    made = other.embed_sources(FakeCorpus(), FakePictures(), tmp_path / "e", overwrite=True)
    np.testing.assert_allclose(made.vectors, plain_sources(FakeDual(1), FakeCorpus()), atol=2e-6)
    (tmp_path / "e" / "embeddings.npy").write_bytes(b"junk")
    refuses("missing or damaged", open_embeddings, tmp_path / "e")


def test_fingerprint_says_what_decides_an_embedding():
    assert embedder().fingerprint == embedder(batch_size=8).fingerprint
    assert embedder().fingerprint != embedder(buckets=(4, 8)).fingerprint
    renamed = FakeTokenizer()
    renamed.fingerprint = "another vocabulary"
    graphdef, state = nnx.split(FakeDual())
    changed = Embedder(graphdef, state, renamed, image_size=SIDE, buckets=BUCKETS)
    assert changed.fingerprint != embedder().fingerprint
    assert embedder(fingerprint="given").fingerprint == "given"


def test_bad_input(tmp_path):
    one = shared()
    refuses("2 questions but 1 pictures", one.embed_questions, ["a", "b"], [None])
    with pytest.raises(UserError, match=r"float32\[4, 4, 3\], uint8\[4, 4, 3\] was expected"):
        one.embed_questions(["a"], [picture(0).astype(np.float32)])
    refuses("buckets", embedder, buckets=(8, 4))
    big = FakePictures()
    big.size = 8
    with pytest.raises(UserError, match="8 pixels wide"):
        one.embed_sources(FakeCorpus(), big, tmp_path / "e")
    with pytest.raises(UserError, match="corpus is empty"):
        one.embed_sources(FakeCorpus(0), FakePictures(), tmp_path / "e")


@pytest.mark.parametrize("wanted", ["clip", "siglip"])
def test_converted_models_of_another_kind_are_refused(tmp_path, wanted):
    """Before a tokenizer is looked for, which they need not have."""
    (tmp_path / "weights").mkdir()
    record = describe_model(architecture("bert"), BertConfig(), "float32")
    write_json(tmp_path / "model.json", record)
    said = f"holds a model of kind 'bert', {wanted} was expected; convert one with `mmqa convert"
    refuses(said, load_two_towers, tmp_path, wanted)


def test_values_that_are_not_finite_stop_the_job(tmp_path):
    def broken(rows):
        vectors = ones(rows)
        if 13 in rows:
            vectors[13 - rows.start] = np.nan
        return vectors

    refuses("1 sources are not finite, the first is row 13", write, tmp_path / "e", broken, rows=30)
    assert read_json(tmp_path / "e" / "manifest.json")["complete"] is False
    assert files(shards(tmp_path / "e")) == ["00000.jsonl", "job.json"]


def test_a_source_whose_vector_is_not_finite_is_named(tmp_path):
    model = FakeDual()
    broken = embedder(model)
    broken._encode_text = lambda state, ids, mask: jnp.full((len(ids), DIM), jnp.nan)
    name = FakeCorpus().sources[1].id
    with pytest.raises(UserError, match=rf"source '{name}' \(row 1\); the checkpoint is broken"):
        broken.embed_sources(FakeCorpus(), FakePictures(), tmp_path / "e")
    refuses(r"embedder: the texts: row 0 of 1 is not finite", broken.embed_questions, ["a"])
