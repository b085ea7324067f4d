"""openvqa's questions as words (openvqa/datasets/vqa/vqa_loader.py, `tokenize`, `proc_ques`)."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence

import numpy as np
from jaxtyping import Float32

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.files import read_json, write_json
from mmqa_jax.data.formats.tables import whole_number

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
