"""Tokenizers in GGUF files: token ids beside transformers', tokenizers' and sentencepiece's."""

import json
import random

import pytest
import regex
import sentencepiece
import transformers
from test_text_tokenizer import CORPUS, write_gguf
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS
from transformers.models.qwen3_5 import tokenization_qwen3_5

from mmqa_jax.core.errors import UserError
from mmqa_jax.prompting.backends import Message
from mmqa_jax.prompting.backends.thinking import Thinking
from mmqa_jax.prompting.text_tokenizer import open_text_tokenizer

HOSTILE = [
    "I'll, I'LL; we'Ve it'S o'clock 'tis ''d 'dd",
    "1 12 123 1234 12345678 3.14159 1,000,000 ½ ² ٣٤٥ Ⅻ x86_64 2e10",
    "漢字とひらがなカタカナ、한국어。中文123測試！ ไทย हिन्दी நல்ல עִבְרִית عربي",
    "camelCase HTTPServer iPhone ǅungla ÀÉÎ Straße ŒUVRE aB1cD",
    "cafe\u0301 caf\u00e9 A\u030a \u212b ﬁ \u1e9b\u0323 \u0344",
    "😀👍🏽👩\u200d👩\u200d👧 🇩🇪 ❤\ufe0f☃ \u200b\ufeff\u00ad",
    "a  b   c    d\t\te \t f\u00a0g\u3000h\u2003i ",
    "\n \n\n\n x\r\n\r\ny \r z\n  \n\tend  \n",
    "foo/bar//baz\n/// #$%&'()*+,-./:;<=>?@[\\]^_`{|}~ ...\n\n--!!\r\n ?!/\n",
    "def f(x):\n    return x**2  # ok\n\n\tif a<=b && c!=d: {'k': \"v\"}",
    " leading", "  two", " ", "   ", "trailing   ", "\n", "'", "’s it’s",
]  # fmt: skip


def _random_texts(count: int) -> list[str]:
    draw = random.Random(7)
    parts = [
        *"aZéßΩǅ漢あカ한ไा9٣½'’ \t\n\r\u00a0.,!/$+€😀\u0301\u200d_-",
        "'s",
        "'LL",
        "  ",
        "\r\n",
    ]
    return ["".join(draw.choices(parts, k=draw.randrange(1, 30))) for _ in range(count)]


TEXTS = [*HOSTILE, *_random_texts(400)]


@pytest.fixture(scope="module")
def bpe() -> tuple[list[str], list[tuple[str, str]]]:
    """Tokens and merges of bytes that reach across words, so that each splitting shows."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=3000, initial_alphabet=alphabet, show_progress=False, min_frequency=1
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    vocabulary = tokenizer.get_vocab()
    state = tokenizer.model.__getstate__().decode()
    merges = [tuple(pair) for pair in json.loads(state)["merges"]]
    return sorted(vocabulary, key=vocabulary.__getitem__), merges


def _split(*patterns: str, normalizer=None):
    """What tokenizer.json files of these models hold, by the tokenizers library."""
    in_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
    return normalizer, pre_tokenizers.Sequence([*splits, in_bytes])


def _of_class(kind: type):
    theirs = kind(vocab={"a": 0, "<|endoftext|>": 1}, merges=[]).backend_tokenizer
    return theirs.normalizer, theirs.pre_tokenizer


_STARCODER = pre_tokenizers.Sequence(
    [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
)
REFERENCES = {
    **{
        name: lambda name=name: _split(GGUF_PRE_TOKENIZER_SPLITS[name])
        for name in ("llama-bpe", "falcon3", "dbrx", "smaug-bpe", "tekken", "gpt-4o", "llama4")
    },
    **dict.fromkeys(("smollm", "refact", "starcoder"), lambda: (None, _STARCODER)),
    "qwen2": lambda: _of_class(transformers.Qwen2Tokenizer),
    "deepseek-r1-qwen": lambda: _of_class(transformers.Qwen2Tokenizer),
    "qwen35": lambda: _split(tokenization_qwen3_5.PRETOKENIZE_REGEX, normalizer=normalizers.NFC()),
    "command-r": lambda: _of_class(transformers.CohereTokenizer),
    "gpt-2": lambda: _of_class(transformers.GPT2Tokenizer),
    "olmo": lambda: _of_class(transformers.GPTNeoXTokenizer),
}


def _file(path, bpe, splitting, special=(), **more):
    tokens, merges = bpe
    return write_gguf(
        path, "gpt2", splitting, [*tokens, *special], [1] * len(tokens) + [3] * len(special),
        token_merges=[" ".join(pair) for pair in merges], **more,
    )  # fmt: skip


@pytest.mark.parametrize("splitting", REFERENCES)
def test_ids_are_those_of_the_published_tokenizer(splitting, bpe, tmp_path):
    tokens, merges = bpe
    ours = open_text_tokenizer(_file(tmp_path / "m.gguf", bpe, splitting))
    vocabulary = {token: number for number, token in enumerate(tokens)}
    whole = splitting in ("llama-bpe", "falcon3", "tekken")
    theirs = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=whole))
    theirs.normalizer, theirs.pre_tokenizer = REFERENCES[splitting]()
    for text in TEXTS:
        assert ours.encode_plain(text) == theirs.encode(text).ids, text


# DeepSeek's splittings, which no library here has, as llama.cpp applies them: one after the other.
DEEPSEEK = {
    "deepseek-coder": [r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-\ud7ff]+", r"\p{N}"],
    "deepseek-v3": [
        r"\p{N}{1,3}",
        "[一-龥\u3040-\u309f\u30a0-\u30ff]+",
        r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
        r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ],
}


@pytest.mark.parametrize("splitting", DEEPSEEK)
def test_splittings_of_several_patterns(splitting, bpe, tmp_path):
    ours = open_text_tokenizer(_file(tmp_path / "m.gguf", bpe, splitting)).published
    for text in TEXTS:
        words = [text]
        for pattern in DEEPSEEK[splitting]:
            words = [
                part
                for word in words
                for part in regex.split(f"({pattern})", word, flags=regex.V1)
                if part
            ]
        split = ours.pre_tokenizer.pre_tokenize_str(text)
        assert [text[start:end] for _, (start, end) in split] == words, text


TURNS = {  # doc_15: the file's end of a document, the end of its template's turns
    "llama-3": ("<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>"),
    "chatml": ("<s>", "<|endoftext|>", "<|im_end|>"),
    "gemma": ("<bos>", "<eos>", "<end_of_turn>"),
    "phi-3": ("<s>", "<|endoftext|>", "<|end|>"),
}


@pytest.mark.parametrize("special", TURNS.values(), ids=list(TURNS))
def test_ends_of_turns_are_known_by_their_text(special, bpe, tmp_path):
    first = len(bpe[0])
    file = _file(
        *(tmp_path / "m.gguf", bpe, "llama-bpe", special),
        **{"bos_token_id": first, "eos_token_id": first + 1},
    )
    ours = open_text_tokenizer(file)
    assert ours.end_ids == (first + 1, first + 2)
    assert ours.bos == first
    assert ours.encode(f"a{special[2]}") == [first, *ours.encode_plain("a"), first + 2]


def test_gpt_oss_goes_on_after_its_thoughts(bpe, tmp_path):
    first = len(bpe[0])
    special = ("<|return|>", "<|call|>", "<|end|>")
    file = _file(tmp_path / "m.gguf", bpe, "gpt-4o", special, eos_token_id=first)
    assert open_text_tokenizer(file).end_ids == (first, first + 1)


def test_merges_of_other_tokens_are_refused(bpe, tmp_path):
    broken = (bpe[0], [("nowhere", "else")])
    with pytest.raises(UserError, match=r"m\.gguf: its merges are not of its tokens.*fetch"):
        open_text_tokenizer(_file(tmp_path / "m.gguf", broken, "qwen2"))


def test_runs_of_spaces_as_gemmas_files_spell_them(tmp_path):
    """SentencePiece with symbols of its own for runs of spaces; llama.cpp writes them as spaces."""
    (tmp_path / "corpus.txt").write_text("\n".join(CORPUS))
    runs = ["▁" * count for count in range(2, 9)]
    sentencepiece.SentencePieceTrainer.train(
        input=str(tmp_path / "corpus.txt"), model_prefix=str(tmp_path / "spm"), vocab_size=440,
        model_type="bpe", byte_fallback=True, normalization_rule_name="identity",
        remove_extra_whitespaces=False, split_digits=True, add_dummy_prefix=False,
        allow_whitespace_only_pieces=True, user_defined_symbols=runs, minloglevel=2,
    )  # fmt: skip
    theirs = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "spm.model"))
    count = range(theirs.get_piece_size())
    pieces = [theirs.id_to_piece(number) for number in count]
    kinds = [
        3 if theirs.is_control(n) else 2 if theirs.is_unknown(n) else 6 if theirs.is_byte(n) else
        4 if pieces[n] in runs else 1 for n in count
    ]  # fmt: skip
    spelled = [piece.replace("▁", " ") if piece in runs else piece for piece in pieces]
    file = write_gguf(
        *(tmp_path / "m.gguf", "llama", "default", spelled, kinds),
        **{"token_scores": list(map(theirs.get_score, count)), "add_space_prefix": False},
    )
    ours = open_text_tokenizer(file)
    assert ours.bos == theirs.bos_id()
    for text in [*CORPUS[:4], "a  b   c      d", "  two", "def f:\n        x", *TEXTS[:200]]:
        assert ours.encode_plain(text) == theirs.encode(text), text


def test_a_files_template_is_told_whether_to_think(bpe, tmp_path):
    source = (
        "{{ messages[0].content }}{% if add_generation_prompt %}>"
        "{% if enable_thinking is false %}<think></think>{% endif %}{% endif %}"
    )
    file = _file(tmp_path / "m.gguf", bpe, "qwen2", chat_template=source)
    asked = [Message("user", ("a",))]
    told = [open_text_tokenizer(file, Thinking(on)) for on in (None, True, False)]
    rendered = [tokenizer.template.render("q", asked) for tokenizer in told]
    assert rendered == ["a>", "a>", "a><think></think>"]
    assert len({tokenizer.fingerprint for tokenizer in told}) == 3
