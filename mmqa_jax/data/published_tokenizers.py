"""Opens published tokenizers: of encoders of texts, of CLIP and of SigLIP; openvqa's words."""

from __future__ import annotations

import base64
import gzip
import json
import os
import re
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import numpy as np
from jaxtyping import Float32
from tokenizers import Regex, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Pipeline

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.files import decode_text, read_json, read_text, write_json
from mmqa_jax.core.paths import as_path
from mmqa_jax.data import tokenizer_files, tokenizers
from mmqa_jax.data.formats.tables import whole_number
from mmqa_jax.data.tokenizer_files import FILE, SETTINGS, SPIECE, spelling

_PROBE = "a"

# Published encoders of texts, whatever their model: WordPiece, SentencePiece or bytes.


def load_encoder_tokenizer(
    folder: str | os.PathLike, vocab_size: int, *, lowercase: bool = False, pairs: bool = True
) -> tokenizers.Tokenizer:
    """The tokenizer of a published encoder's folder.

    Args:
      vocab_size: of the model, which no id may exceed.
      lowercase: put texts in lower case first.
      pairs: whether one token has to stand on each side of a text and some between the texts of a
        pair; False: of a decoder, with any tokens around a text, or none.
    """
    folder = Path(folder)
    file = folder / FILE
    if not file.is_file():
        raise UserError(
            f"{file}: no such file; save it with transformers' "
            "`AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)`."
        )
    settings, pipeline = tokenizer_files.read_object(folder / SETTINGS), _any_text(file)
    tokenizer = published_tokenizer(pipeline, settings, str(file), lowercase=lowercase, pairs=pairs)
    return _within(tokenizer, vocab_size, file)


def published_tokenizer(
    pipeline: Pipeline, settings: Mapping[str, Any], where: str, *, lowercase=False, pairs=False
) -> tokenizers.Tokenizer:
    """The tokenizer of a pipeline and a tokenizer_config.json; see `load_encoder_tokenizer`.

    Messages name the file by `where`.
    """
    between: list[int] = []
    second_type = 0
    if pairs:
        wanted = "one token before and one after a text were expected, as BERT and RoBERTa have"
        before, after = _around(pipeline, where, wanted)
        size, pair = len(pipeline.encode(_PROBE).ids) - 2, pipeline.encode(_PROBE, _PROBE)
        text, between = pair.ids[1 : 1 + size], pair.ids[1 + size : len(pair.ids) - size - 1]
        if (
            len(before) != 1
            or len(after) != 1
            or not between
            or pair.ids != [*before, *text, *between, *text, *after]
        ):
            raise _foreign_template(pipeline, where, wanted)
        second_type = pair.type_ids[-1]
    else:
        before, after = _around(pipeline, where, "the text's own tokens were expected among them")
    pad = _padding(pipeline, settings)
    if pad is None and pairs:
        raise _no_padding(where)
    if settings.get("truncation_side", "right") != "right":
        raise UserError(
            f"{where}: truncation_side {settings['truncation_side']!r} cuts the beginning of "
            "long texts, which is not done here; take the key out."
        )
    if lowercase:
        _put_in_lower_case(pipeline)
    longest = settings.get("model_max_length")
    is_length = isinstance(longest, int | float) and 0 < longest < 1 << 30  # 1e30: not said
    pieces = tokenizers.MarkedTokenizer(pipeline)
    # Nothing sees what is behind a text: any token will do where a decoder names none.
    pad = 0 if pad is None else pad
    ends = [*before, *after, pad, *between, second_type] if pairs else [before, after, pad]
    content = json.loads(pipeline.to_str())
    parts = [content[name] for name in ("model", "normalizer", "pre_tokenizer", "added_tokens")]
    return tokenizers.Tokenizer(
        "published",
        pieces,
        tokenizers.digest([*parts, ends]),
        before=before,
        after=after,
        pad_id=pad,
        between=between,
        second_type=second_type,
        max_tokens=int(longest) if is_length else None,
    )


def _any_text(file: Path) -> Pipeline:
    """The tokenizer of a published tokenizer.json, which takes any text."""
    pipeline = tokenizer_files.read_tokenizer(file)
    tokenizer_files.check_any_text(pipeline, file)
    return pipeline


def _around(pipeline: Pipeline, where: str, wanted: str) -> tuple[list[int], list[int]]:
    """Returns what the post-processor adds before and after a text; messages name it `wanted`."""
    pipeline.no_padding()
    pipeline.no_truncation()
    plain = pipeline.encode(_PROBE, add_special_tokens=False).ids
    whole = pipeline.encode(_PROBE).ids
    for first in range(len(whole) - len(plain) + 1):
        before, after = whole[:first], whole[first + len(plain) :]
        if plain and [*before, *plain, *after] == whole:
            return before, after
    raise _foreign_template(pipeline, where, wanted)


def _foreign_template(pipeline: Pipeline, where: str, wanted: str) -> UserError:
    return UserError(
        f"{where}: its template makes {pipeline.encode(_PROBE).tokens} of {_PROBE!r}; {wanted}; "
        "put the checkpoint's own tokenizer there."
    )


def _padding(pipeline: Pipeline, settings: Mapping[str, Any]) -> int | None:
    for token in (spelling(settings.get("pad_token")), "[PAD]", "<pad>"):
        if token is not None and (known := pipeline.token_to_id(token)) is not None:
            return known
    return None


def _no_padding(where: str | Path) -> UserError:
    return UserError(
        f"{where}: no padding token is known; name one of its tokens as pad_token in {SETTINGS}."
    )


def _put_in_lower_case(pipeline: Pipeline) -> None:
    steps = [] if pipeline.normalizer is None else [pipeline.normalizer]
    pipeline.normalizer = normalizers.Sequence([normalizers.Lowercase(), *steps])


def _within(tokenizer: tokenizers.Tokenizer, vocab_size: int, place: Path) -> tokenizers.Tokenizer:
    """The tokenizer; UserError where it has ids that a model's table lacks."""
    if tokenizer.vocab_size > vocab_size:
        raise UserError(
            f"{place}: the tokenizer has {tokenizer.vocab_size:,} tokens, the model "
            f"{vocab_size:,}; put the checkpoint's own tokenizer there."
        )
    return tokenizer


# CLIP's byte-pair tokenizer, lower case, from the files published with its weights.
#
# OpenAI's code and transformers' make other tokens of the same text: OpenAI's (and open_clip's,
# which copied it) repairs broken encodings and curly quotes with ftfy and resolves HTML entities
# first. A checkpoint follows the code that it was published with.

START, END = "<|startoftext|>", "<|endoftext|>"
OPENAI_MERGES = "bpe_simple_vocab_16e6.txt.gz"
_OPENAI_TOKENS = 49_408  # of which 256 bytes, the same at a word's end, START and END
_MOST_MERGES = 1 << 23  # bytes of the file, twice what OpenAI's has
# openai/CLIP clip/simple_tokenizer.py: contractions, runs of letters, single digits, the rest.
_PIECES = r"'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+"
_RECORD = "model.json"  # of a folder of `mmqa convert`


def _clip_tokenizer(
    vocabulary: dict[str, int],
    merges: Sequence[tuple[str, str]],
    preprocessing: tokenizers.Preprocessing,
) -> tokenizers.Tokenizer:
    """CLIP's tokenizer of a vocabulary (token -> id) and of pairs in order of their rank."""
    pipeline = Pipeline(
        models.BPE(
            vocabulary, list(merges), end_of_word_suffix="</w>", unk_token=END, fuse_unk=False
        )
    )
    # ftfy, of OpenAI's `_clean`, composes characters. That its tokenizer.json lacks NFC is how one
    # that was saved here is known.
    composed = [normalizers.NFC()] if preprocessing == "transformers" else []
    pipeline.normalizer = normalizers.Sequence(
        [*composed, normalizers.Replace(Regex(r"\s+"), " "), normalizers.Lowercase()]
    )
    pipeline.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), behavior="removed", invert=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    start, end = vocabulary[START], vocabulary[END]
    return tokenizers.Tokenizer(
        "CLIP",
        tokenizers.MarkedTokenizer(pipeline),
        tokenizers.digest(
            [sorted(vocabulary.items()), [list(pair) for pair in merges], preprocessing]
        ),
        before=[start],
        after=[end],
        pad_id=end,
        preprocessing=preprocessing,
    )


def load_clip_tokenizer(
    folder: str | os.PathLike, preprocessing: tokenizers.Preprocessing | None = None
) -> tokenizers.Tokenizer:
    """Reads the files published with CLIP: vocab.json and merges.txt, tokenizer.json, or OpenAI's
    bpe_simple_vocab_16e6.txt.gz.

    Args:
      folder: of the files, as published or as `mmqa convert` or training wrote it.
      preprocessing: None takes what the folder's checkpoint was published with; in a folder
        without model.json, what the tokenizer's files were.
    """
    folder = Path(folder)
    preprocessing = preprocessing or published_preprocessing(folder)
    path = folder / "vocab.json"
    if path.is_file():
        vocabulary = read_json(path)
        merges = _merges(read_text(folder / "merges.txt"))
    elif (folder / FILE).is_file():
        path = folder / FILE
        content = read_json(path)
        model = content.get("model", {})
        vocabulary, merges = model.get("vocab"), model.get("merges", [])
        merges = [pair.split() if isinstance(pair, str) else pair for pair in merges]
        if '"NFC"' not in json.dumps(content.get("normalizer")):
            preprocessing = preprocessing or "openai"
    elif (folder / OPENAI_MERGES).is_file():
        return _from_openai(folder / OPENAI_MERGES, preprocessing or "openai")
    else:
        raise UserError(
            f"{folder}: has no tokenizer (vocab.json with merges.txt, tokenizer.json, or OpenAI's "
            f"{OPENAI_MERGES}); put the one published with the checkpoint there."
        )
    if not isinstance(vocabulary, dict) or not {START, END} <= vocabulary.keys():
        raise UserError(
            f"{path}: is not CLIP's vocabulary (it lacks {START} and {END}); put the tokenizer "
            "published with the checkpoint there."
        )
    return _clip_tokenizer(vocabulary, list(map(tuple, merges)), preprocessing or "transformers")


def published_preprocessing(folder: str | os.PathLike) -> tokenizers.Preprocessing | None:
    """Returns whose code prepared the inputs of a CLIP of `mmqa convert`; None: unknown.

    The record of a conversion names it, or (of older versions) the layout of the source.
    """
    file = Path(folder) / _RECORD
    record = tokenizer_files.read_object(file)
    if "layout" not in record:  # not of a conversion
        return None
    usual = "transformers" if record["layout"] == "transformers" else "openai"
    named = record.get("preprocessing") or usual
    if named not in (known := get_args(tokenizers.Preprocessing)):
        raise UserError(
            f"{file}: preprocessing is {named!r}: expected one of {', '.join(known)}; correct it "
            "or convert the model again."
        )
    return named


def _merges(text: str) -> list[list[str]]:
    return [line.split() for line in text.split("\n") if line and not line.startswith("#version")]


def _from_openai(path: Path, preprocessing: tokenizers.Preprocessing) -> tokenizers.Tokenizer:
    """The tokenizer of openai/CLIP clip/simple_tokenizer.py; its ids follow from the merges."""
    try:
        with gzip.open(path) as file:
            # The first line is a title; the file has more merges than CLIP uses.
            lines = decode_text(file.read(_MOST_MERGES), path).split("\n")[1:]
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"{path}: cannot be read as gzip ({error}); fetch it again.") from None
    symbols = list(tokenizer_files.byte_symbols())
    merges = _merges("\n".join(lines[: _OPENAI_TOKENS - 2 * len(symbols) - 2]))
    tokens = [*symbols, *(symbol + "</w>" for symbol in symbols), *map("".join, merges), START, END]
    vocabulary = {token: row for row, token in enumerate(tokens)}
    whole = len(vocabulary) == len(tokens) == _OPENAI_TOKENS
    if not whole or any(len(pair) != 2 for pair in merges):
        raise UserError(
            f"{path}: does not hold CLIP's {_OPENAI_TOKENS - 514:,} merges; fetch OpenAI's file."
        )
    return _clip_tokenizer(vocabulary, [(a, b) for a, b in merges], preprocessing)


# SigLIP's tokenizers: SentencePiece over canonical texts, and SigLIP 2's, which is Gemma's.
#
# Both put one token after a text and none before it. The model was trained on texts padded to its
# whole length, and sees the padding.

_SAVED = "siglip"  # the key of a file that `save` wrote


def siglip_tokenizer(saved: Mapping[str, Any]) -> tokenizers.Tokenizer:
    """SigLIP's tokenizer, of what `save` writes.

    That is `spiece` (base64) with `lowercase`, whether texts are put in lower case, or `tokenizer`
    (a tokenizer.json); and the ids `end` and `pad`.
    """
    if "spiece" in saved:
        pieces = tokenizers.SentencePieces(base64.b64decode(saved["spiece"]), saved["lowercase"])
    else:
        pieces = tokenizers.MarkedTokenizer(Pipeline.from_str(saved["tokenizer"]))
    return tokenizers.Tokenizer(
        "SigLIP",
        pieces,
        tokenizers.digest(dict(sorted(saved.items()))),
        after=[saved["end"]],
        pad_id=saved["pad"],
        saved=json.dumps({_SAVED: saved}),
    )


def load_siglip_tokenizer(folder: str | os.PathLike, vocab_size: int) -> tokenizers.Tokenizer:
    """Reads the files published with a SigLIP: spiece.model, or SigLIP 2's tokenizer.json.

    No id may exceed the model's `vocab_size`.
    """
    folder = Path(folder)
    settings = tokenizer_files.read_object(folder / SETTINGS)
    for key in ("padding_side", "truncation_side"):
        if settings.get(key, "right") != "right":
            raise UserError(
                f"{folder / SETTINGS}: {key} is {settings[key]!r}, expected 'right', as SigLIP was "
                "trained; correct it."
            )
    if (folder / SPIECE).is_file():
        saved = _of_pieces(folder / SPIECE, settings)
    elif (folder / FILE).is_file():
        saved = _of_gemma(folder / FILE, settings)
    else:
        raise UserError(
            f"{folder}: has no tokenizer ({SPIECE}, or SigLIP 2's {FILE}); put the one published "
            "with the checkpoint there."
        )
    return _within(siglip_tokenizer(saved), vocab_size, folder)


def _of_pieces(file: Path, settings: Mapping[str, Any]) -> dict[str, Any]:
    model, lowercase = file.read_bytes(), settings.get("do_lower_case", True)
    if not isinstance(lowercase, bool):
        raise UserError(
            f"{file.parent / SETTINGS}: do_lower_case is {lowercase!r}, expected true or false; "
            "correct it."
        )
    try:
        pieces = tokenizers.SentencePieces(model, lowercase)
    except (RuntimeError, OSError) as error:
        raise UserError(f"{file}: not a SentencePiece model ({error}); fetch it again.") from None
    saved = {"spiece": base64.b64encode(model).decode(), "lowercase": lowercase}
    for name, key in (("end", "eos_token"), ("pad", "pad_token")):
        token = spelling(settings.get(key)) or "</s>"
        saved[name] = pieces.token_id(token)
        if saved[name] is None:
            raise UserError(
                f"{file}: has no piece {token!r}, the {key}; put the checkpoint's own files there."
            )
    return saved


def _of_gemma(file: Path, settings: Mapping[str, Any]) -> dict[str, Any]:
    pipeline = _any_text(file)
    wanted = "one token after a text and none before it was expected, as SigLIP 2 has it"
    before, after = _around(pipeline, str(file), wanted)
    named = spelling(settings.get("eos_token"))
    if not after and settings.get("add_eos_token") and named:
        after = [pipeline.token_to_id(named)]
    if before or len(after) != 1 or after[0] is None:
        raise _foreign_template(pipeline, str(file), wanted)
    pad = _padding(pipeline, settings)
    if pad is None:
        raise _no_padding(file)
    # SigLIP 2 was trained on lower case (big_vision; transformers' Siglip2Tokenizer).
    _put_in_lower_case(pipeline)
    return {"tokenizer": pipeline.to_str(), "end": after[0], "pad": pad}


def open_tokenizer(path: str | os.PathLike) -> tokenizers.Tokenizer | QuestionWords:
    """Opens a tokenizer of texts: a file, or the folder of a CLIP or SigLIP.

    The file is a WordPiece's or CLIP's tokenizer.json, what `save` wrote, or openvqa's words.
    """
    path = as_path(path)
    if path.is_dir():
        record = tokenizer_files.read_object(path / _RECORD)
        if record.get("model") == "siglip":
            return load_siglip_tokenizer(path, record["config"]["text"]["vocab_size"])
        return load_clip_tokenizer(path)
    text = read_text(path) if path.is_file() else ""
    if text.lstrip().startswith("["):
        return read_words(path)
    if text.startswith(f'{{"{_SAVED}"'):
        saved = read_json(path)[_SAVED]
        if "tokenizer" in saved:
            tokenizer_files.tokenizer_of(saved["tokenizer"], str(path))
        return siglip_tokenizer(saved)
    if path.name == FILE and '"BPE"' in text:
        content = read_json(path)
        model = content.get("model") if isinstance(content, dict) else None
        if isinstance(model, dict) and model.get("type") == "BPE":
            return load_clip_tokenizer(path.parent)
    return tokenizers.load_tokenizer(path)


# openvqa's questions as words (openvqa/datasets/vqa/vqa_loader.py, `tokenize`, `proc_ques`).


PAD, UNKNOWN, CLS = "PAD", "UNK", "CLS"  # the first three of the vocabulary

_REMOVED = re.compile(r"([.,'!?\"()*#:;])")


def words_of(question: str) -> list[str]:
    """Lower case, without punctuation; `-` and `/` part words."""
    plain = _REMOVED.sub("", question.lower())
    return plain.replace("-", " ").replace("/", " ").split()


class QuestionWords:
    """Word numbers of questions; the first three of `words` are PAD, UNK and CLS."""

    kind = "words"

    def __init__(self, words: Sequence[str]):
        self.words = tuple(words)
        self._number = {word: number for number, word in enumerate(self.words)}

    @property
    def vocab_size(self) -> int:
        """How many words there are."""
        return len(self.words)

    def encode(self, question: str) -> list[int]:
        """Word numbers; 1 is a word that is not in the vocabulary."""
        unknown = self._number[UNKNOWN]
        return [self._number.get(word, unknown) for word in words_of(question)]

    def save(self, path: str | os.PathLike) -> None:
        """Writes a list by number."""
        write_json(path, list(self.words))


def make_words(questions: Iterable[str]) -> QuestionWords:
    """All words of the questions, in the order of their appearance."""
    words = dict.fromkeys((PAD, UNKNOWN, CLS))
    for question in questions:
        words |= dict.fromkeys(words_of(question))
    return QuestionWords(list(words))


def read_words(path: str | os.PathLike) -> QuestionWords:
    """Reads what `save` wrote, or openvqa's token_dict.json ({word: number} or in a list)."""
    data = read_json(path)
    if isinstance(data, list) and data and isinstance(data[0], dict):
        data = data[0]
    if isinstance(data, dict):
        numbered = {whole_number(number): word for word, number in data.items()}
        data = [numbered.get(number) for number in range(len(numbered))]
    special = [PAD, UNKNOWN, CLS]
    if (
        not isinstance(data, list)
        or data[:3] != special
        or not all(isinstance(x, str) for x in data)
    ):
        raise UserError(
            f"{path}: a list of words that begins with {', '.join(special)} was expected; give "
            "that of the run that trained the model."
        )
    return QuestionWords(data)


def read_glove(path: str | os.PathLike, words: QuestionWords) -> Float32[np.ndarray, "words D"]:
    """The words' vectors in a GloVe text file (`word value value ...` a line); zeros for others."""
    wanted = {word: number for number, word in enumerate(words.words)}
    rows: dict[int, np.ndarray] = {}
    size = None
    try:
        with open(path, encoding="utf-8-sig") as file:
            for line_number, line in enumerate(file, start=1):
                word, *values = line.rstrip("\n").split(" ")
                if word not in wanted:
                    continue
                size = size or len(values)
                try:
                    vector = np.array(values, np.float32)
                except ValueError:
                    vector = np.zeros(0, np.float32)
                if len(vector) != size:
                    raise UserError(
                        f"{path}, line {line_number}: a word and {size} numbers were expected; "
                        "fetch the file again."
                    )
                rows[wanted[word]] = vector
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read as GloVe vectors ({error}).") from error
    if size is None:
        raise UserError(f"{path}: has a vector of none of the words; give GloVe's text file.")
    vectors = np.zeros((words.vocab_size, size), np.float32)
    vectors[list(rows)] = list(rows.values())
    return vectors
