"""LLaVA's conversations of questions with choices, as its files of ScienceQA's test set are."""

from __future__ import annotations

import re

from mmqa_jax.data.formats.official import HAS_HINT, Entry

_OPTION = re.compile(r"^([A-Z])\. ", re.MULTILINE)


def parse_conversation(text: str) -> tuple[str, tuple[str, ...]]:
    """LLaVA's prompt of a question -> (context and question, choices).

    `Context: ` and a hint may come before the question; the choices are the last lines that begin
    with `A. `, `B. `, ...

    Raises:
      ValueError: there are no such lines.
    """
    text = text.removeprefix("<image>\n").removesuffix("\n<image>")
    options = list(_OPTION.finditer(text))
    first = max((n for n, option in enumerate(options) if option[1] == "A"), default=None)
    if first is None:
        raise ValueError("no line that begins with `A. `")
    options = options[first:]
    letters = [option[1] for option in options]
    if letters != [chr(ord("A") + n) for n in range(len(letters))]:
        raise ValueError(f"choices {', '.join(letters)}")
    ends = [option.start() - 1 for option in options[1:]] + [len(text)]
    choices = tuple(text[a.end() : b] for a, b in zip(options, ends, strict=True))
    return text[: options[0].start()].removesuffix("\n"), choices


def question_entry(row: Entry) -> Entry:
    """The question, choices and answer of one {"conversations": [{"value": prompt}, {"value":
    letter}]}.
    """
    try:
        turns = row["conversations"]
        question, choices = parse_conversation(turns[0]["value"])
        answer = [*"ABCDEFGHIJ"].index(turns[1]["value"])
    except (TypeError, KeyError, IndexError, ValueError, AttributeError) as error:
        raise row.error(
            "not a conversation of a question with choices `A. `, `B. `, ..., and a letter as the "
            f"answer ({error})"
        ) from error
    has_hint = question.startswith("Context: ")
    values = {"question": question, "choices": [*choices], "answer": answer, HAS_HINT: has_hint}
    return Entry(row.where, values)
