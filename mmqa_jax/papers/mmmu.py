"""MMMU (Yue et al., CVPR 2024): a vision-language model alone, by the benchmark's own prompts.

One question with its pictures, no examples; the model answers with a letter, or in a word or
phrase (templates/mmmu.toml).

  llm.answer(queries) -> a response for every prompt
"""

import re
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from mmqa_jax.data.corpus import Corpus
from mmqa_jax.data.schema import Prediction, Question
from mmqa_jax.evaluation.multiple_choice import LETTERS
from mmqa_jax.papers.setting import Setting
from mmqa_jax.prompting import few_shot
from mmqa_jax.prompting.backends import Backend, Chat, Decoding, Picture

Shown = Literal["placed", "first", "none"]
_PLACE = re.compile(r"<image (\d)>")


def answer_mmmu(
    questions: Sequence[Question],
    corpus: Corpus,
    llm: Backend,
    *,
    pictures: Shown = "placed",
    max_new_tokens: int = 128,
) -> list[Prediction]:
    """The model's response; a picture that is absent leaves its `<image 2>` in the prompt. `placed`
    shows each one wherever its `<image 2>` stands, as VLMEvalKit does, for a model that takes
    several; `first` shows the first one in front and leaves all marks in the text, as the authors'
    run_llava.py; `none` shows none."""
    decoding = Decoding(max_new_tokens=max_new_tokens)
    asked = {question.id: _asked(corpus, question, pictures) for question in questions}

    def show(key: Hashable, question: Question, text: str) -> Chat:
        prompt, _ = few_shot.as_prompt(text, asked[question.id].pictures, chat=True)
        return Chat(key, prompt, decoding)

    def template(question: Question) -> few_shot.PromptTemplate:
        return few_shot.load_template("mmmu.choice" if question.choices else "mmmu.open")

    replies = few_shot.ask(questions, None, llm, template, lambda q: asked[q.id].fields, show)
    return list(map(few_shot.read_one, questions, replies))


class _Asked(NamedTuple):
    """A template's fields of a question, with a mark for each picture, and these in order."""

    fields: Mapping[str, str]
    pictures: Sequence[Picture]


def _asked(corpus: Corpus, question: Question, pictures_of: Shown) -> _Asked:
    """Pictures that no `<image 2>` stands for come first."""
    pictures = _pictures(corpus, question, pictures_of)
    listed = (f"({LETTERS[n]}) {choice}\n" for n, choice in enumerate(question.choices))
    fields = {"question": question.question, "options": "".join(listed)}
    fields = {name: text.replace(few_shot.MARK, " ") for name, text in fields.items()}
    placed: list[Picture] = []
    if pictures_of == "placed":
        fields = {name: _with_marks(text, pictures, placed) for name, text in fields.items()}
    first = [picture for picture in pictures if picture is not None and picture not in placed]
    fields["question"] = few_shot.MARK * len(first) + fields["question"]
    return _Asked(fields, (*first, *placed))


def _pictures(corpus: Corpus, question: Question, selection: Shown) -> Sequence[Picture | None]:
    """Returns the pictures that may be shown, in order; None for one that is absent."""
    if selection == "none":
        return ()
    first = few_shot.pictures_of(corpus, question) or (None,)
    if selection == "first":
        return first
    more = ((name, corpus.read_picture(name)) for name in question.more_images)
    return (*first, *(None if data is None else Picture(data, name) for name, data in more))


def _with_marks(text: str, pictures: Sequence[Picture | None], placed: list[Picture]) -> str:
    """The text with a mark for each `<image 2>` whose picture is there, which `placed` gets."""

    def place(match: re.Match[str]) -> str:
        number = int(match[1]) - 1
        picture = pictures[number] if 0 <= number < len(pictures) else None
        if picture is None:
            return match[0]
        placed.append(picture)
        return few_shot.MARK

    return _PLACE.sub(place, text)


def _note_left_out(questions: Sequence[Question], options: Mapping[str, Any]) -> list[str]:
    several = sum(bool(question.more_images) for question in questions)
    if options["pictures"] != "first" or not several:
        return []
    return [
        f"pictures=first: {several:,} of {len(questions):,} questions have several pictures, of "
        "which the model saw the first"
    ]


SETTINGS = {"mmmu": Setting(answer_mmmu, write_notes=_note_left_out)}
