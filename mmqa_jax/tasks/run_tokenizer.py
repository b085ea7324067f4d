"""The tokenizer of a run: a published one, one that is trained on the corpus, or a file."""

from __future__ import annotations

from pathlib import Path

import jax

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.hosts import distributed
from mmqa_jax.data.corpus import Corpus
from mmqa_jax.data.published_tokenizers import open_tokenizer
from mmqa_jax.data.question_words import QuestionWords, make_words
from mmqa_jax.data.tokenizers import (
    Tokenizer,
    minilm_tokenizer,
    restrict_vocabulary,
    train_wordpiece,
)

AnyTokenizer = Tokenizer | QuestionWords


def make_tokenizer(name: str, corpus: Corpus, folder: Path) -> AnyTokenizer:
    """The run's tokenizer, saved as tokenizer.json in its folder.

    Args:
      name: `minilm`; `minilm:corpus`, MiniLM's with only the tokens that the corpus and the
        training questions need, the answers' first; `corpus:N`, a WordPiece of N tokens trained
        on them; `words`, the words of all questions (openvqa); the path of a tokenizer.json; or
        the folder of a converted CLIP or SigLIP.
      corpus: what it is trained on.
      folder: of the run; a tokenizer that is already there is used.
    """
    kept = folder / "tokenizer.json"
    if jax.process_index() == 0 and not kept.exists():
        _new_tokenizer(name, corpus).save(kept)
    distributed.barrier("tokenizer")
    return open_tokenizer(kept)


def _new_tokenizer(name: str, corpus: Corpus) -> AnyTokenizer:
    if name == "minilm":
        return minilm_tokenizer()
    if name == "words":
        return make_words(question.question for question in corpus.questions())
    if name == "minilm:corpus":
        texts, answers = _all_texts(corpus), _answers(corpus)
        return restrict_vocabulary(minilm_tokenizer(), texts, first=answers)
    if name.startswith("corpus:"):
        size = name.removeprefix("corpus:")
        if not size.isdecimal() or len(size) > 9:
            raise UserError(f"config key tokenizer={name}: write corpus:N with a number of tokens.")
        return train_wordpiece(_all_texts(corpus), int(size), lowercase=True)
    return open_tokenizer(name)


def _all_texts(corpus: Corpus) -> list[str]:
    texts = [f"{source.title} {source.text}" for source in corpus.sources]
    for question in corpus.questions("train"):
        texts += [question.question, *question.answers]
    return texts


def _answers(corpus: Corpus) -> list[str]:
    return [answer for question in corpus.questions("train") for answer in question.answers]
