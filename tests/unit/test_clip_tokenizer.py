"""CLIP's tokenizer from OpenAI's own file of merges, bpe_simple_vocab_16e6.txt.gz."""

import gzip
import itertools
import tracemalloc

import pytest
from shared_data import SHARED, require

from mmqa_jax.data import published_tokenizers
from mmqa_jax.data.published_tokenizers import OPENAI_MERGES, load_clip_tokenizer
from mmqa_jax.weights.output_folder import copy_companions
from tests.refusals import refuses

pytestmark = pytest.mark.slow

PUBLISHED = SHARED / "weights" / f"clip_{OPENAI_MERGES}"
MERGES = 48_894  # that CLIP uses; its file holds 262,144


def write(folder, merges):
    with gzip.open(folder / OPENAI_MERGES, "wt", encoding="utf-8") as file:
        file.write("\n".join(["a title", *merges, ""]))


def test_ids_follow_from_the_merges(tmp_path):
    symbols = [chr(code) for code in (*range(0x21, 0x7F), *range(0xAE, 0x144))]
    pairs = [f"{a} {b}" for a, b in itertools.product(symbols, repeat=2) if (a, b) != ("c", "a")]
    merges = ["c a", "ca t</w>", *pairs][:MERGES]
    assert len(merges) == MERGES
    write(tmp_path, [*merges, "never used", "nor this"])
    source, folder = tmp_path, tmp_path / "converted"
    folder.mkdir()
    assert copy_companions(source, folder) == [OPENAI_MERGES]
    tokenizer = load_clip_tokenizer(folder)
    assert tokenizer.vocab_size == 49_408
    assert (tokenizer.cls_id, tokenizer.sep_id) == (49_406, 49_407)
    assert tokenizer.encode("Cat") == [513]  # the second merge; 512 ids are of single bytes
    assert tokenizer.encode("!") == [256]  # "!</w>": the first byte at a word's end


def test_published_ids(tmp_path):
    require(PUBLISHED)
    (tmp_path / OPENAI_MERGES).symlink_to(PUBLISHED)
    tokenizer = load_clip_tokenizer(tmp_path)
    # The ids that the documentation of CLIP and of transformers' CLIPTokenizer shows.
    assert tokenizer.encode("a photo of a cat") == [320, 1125, 539, 320, 2368]
    assert tokenizer.encode("hello world!") == [3306, 1002, 256]


def test_refusals(tmp_path, monkeypatch):
    write(tmp_path, ["a b", "c d"])
    refuses("does not hold CLIP's 48,894 merges", load_clip_tokenizer, tmp_path)
    (tmp_path / OPENAI_MERGES).write_bytes(b"no gzip")
    refuses("cannot be read as gzip", load_clip_tokenizer, tmp_path)
    write(tmp_path, ["a b"] * 100)
    whole = (tmp_path / OPENAI_MERGES).read_bytes()
    (tmp_path / OPENAI_MERGES).write_bytes(whole[: len(whole) // 2])
    refuses("cannot be read as gzip", load_clip_tokenizer, tmp_path)
    monkeypatch.setattr(published_tokenizers, "_MOST_MERGES", 1 << 18)
    (tmp_path / OPENAI_MERGES).write_bytes(gzip.compress(b"a b\n" * (1 << 20)))
    tracemalloc.start()
    refuses("does not hold CLIP's 48,894 merges", load_clip_tokenizer, tmp_path)
    assert tracemalloc.get_traced_memory()[1] < 1 << 24  # all lines take 70 MB
    tracemalloc.stop()
