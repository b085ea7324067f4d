"""Result tables: printed with rich, written as markdown, or put in the report.

Their texts hold scores' identifiers; what is shown has their names (`score_name`).
"""

from __future__ import annotations

import dataclasses
import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import IO, TYPE_CHECKING, Any

from mmqa_jax.core.terminal import escaped
from mmqa_jax.evaluation.scores import Scores
from mmqa_jax.evaluation.significance import Interval, bootstrap_interval

if TYPE_CHECKING:
    import rich.table


Cell = str | int | float | Interval | None
# Means per question in scores.json's `llm` -> column.
LLM_USE = {
    "calls_per_question": "LLM calls a question",
    "prompt_tokens_per_question": "prompt tokens a question",
    "completion_tokens_per_question": "new tokens a question",
    "thinking_tokens_per_question": "thinking tokens a question",
}


@dataclasses.dataclass(frozen=True)
class Table:
    """A titled table; floats are shown with three decimals, None as a dash.

    In a report `links` give the page that the first cell of a row leads to.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    note: str = ""
    links: Mapping[int, str] = dataclasses.field(default_factory=dict)

    def __post_init__(self):
        for row in self.rows:
            if len(row) != len(self.columns):
                raise ValueError(f"{self.title}: {len(row)} cells for {len(self.columns)} columns")

    def numeric(self, column: int) -> bool:
        """Whether a column holds only numbers (and is aligned right)."""
        cells = [row[column] for row in self.rows if row[column] is not None]
        return bool(cells) and not any(isinstance(cell, str) for cell in cells)

    def printed_note(self) -> str:
        """The note, with the identifiers of the scores that the table names."""
        texts = [self.title, *self.columns]
        texts += [cell for row in self.rows for cell in row if isinstance(cell, str)]
        named = identifiers_in(texts)
        listed = ", ".join(f"{name} = {identifier}" for name, identifier in named.items())
        return " ".join(filter(None, (self.note, listed and f"Scores: {listed}.")))


def format_cell(cell: Cell) -> str:
    """`0.412`, `1,234`, `0.412 [0.390, 0.434]`, a dash for None, a score by its name."""
    if cell is None:
        return "–"
    if isinstance(cell, Interval):
        return f"{cell.mean:.3f} {format_bounds(cell)}"
    if isinstance(cell, float):
        return f"{cell:.3f}"
    return f"{cell:,}" if isinstance(cell, int) else for_people(cell)


def llm_use(scores: Mapping[str, Any]) -> dict[str, float]:
    """The language model's use per question, from a run's scores.json; {} without one."""
    used = scores.get("llm") or {}
    return {name: used[name] for name in LLM_USE if name in used}


def llm_columns(used: Sequence[Mapping[str, float]]) -> tuple[list[str], list[list[Cell]]]:
    """Columns of what language models were asked, and the cells of every row, from each row's
    `llm_use`.
    """
    names = [name for name in LLM_USE if any(row.get(name) for row in used)]
    # Thousandths of a token say nothing.
    cells = [[_count(row.get(name)) for name in names] for row in used]
    return [LLM_USE[name] for name in names], cells


def score_cell(scores: Mapping[str, Any], scorer: str) -> float | Interval | None:
    """A score of scores.json or sweep.json, with its interval where there is one."""
    value = scores["scores"].get(scorer)
    bounds = (scores.get("intervals") or {}).get(scorer)
    return Interval(value, *bounds) if value is not None and bounds else value


def _count(value: float | None) -> Cell:
    return value if value is None or value < 10 else round(value)


def format_bounds(interval: Interval) -> str:
    """`[0.390, 0.434]`."""
    return f"[{interval.low:.3f}, {interval.high:.3f}]"


def show(table: Table, *, markdown: bool = False) -> None:
    """Prints the table, or its markdown."""
    if markdown:
        _print(to_markdown(table))
        return
    from mmqa_jax.core.progress import Screen

    console = Screen(stderr=False, width=None if sys.stdout.isatty() else 120)
    with console.capture() as rendered:
        console.print(to_rich(table))
    _print(rendered.get().removesuffix("\n"), console.file)


def to_rich(table: Table) -> rich.table.Table:
    """The table for `Screen.print`."""
    import rich.table
    from rich.text import Text

    note = escaped(table.printed_note())
    printed = rich.table.Table(
        title=Text(escaped(for_people(table.title)), "table.title"),
        caption=Text(note, "table.caption") if note else None,
        title_justify="left",
        caption_justify="left",
    )
    for index, column in enumerate(table.columns):
        right = table.numeric(index)
        justify = "right" if right else "left"
        # Cells are wrapped, never cut: names are to be copied.
        printed.add_column(Text(escaped(for_people(column))), justify=justify, overflow="fold")
    for row in table.rows:
        printed.add_row(*(Text(escaped(format_cell(cell))) for cell in row))
    return printed


def to_markdown(table: Table) -> str:
    """The table as GitHub markdown, with its title above and its note below."""

    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"

    rules = ["---:" if table.numeric(index) else "---" for index in range(len(table.columns))]
    columns = list(map(for_people, table.columns))
    lines = [f"**{for_people(table.title)}**", "", line(columns), line(rules)]
    lines += [line([format_cell(cell) for cell in row]) for row in table.rows]
    if note := table.printed_note():
        lines += ["", note]
    return "\n".join(lines) + "\n"


def answer_table(title: str, scores: Scores) -> Table:
    """One setting by category: n, and each scorer with its 95% interval."""

    def row(name: str, n: int, category: str | None) -> list[Cell]:
        values = [_values(scores, scorer, category) for scorer in scores.per_question]
        return [name, n, *map(bootstrap_interval, values)]

    rows = [row(category, n, category) for category, n in scores.counts.items()]
    rows.append(row("all", scores.n, None))
    notes = ["Intervals: 95%, bootstrap over questions."]
    if scores.missing:
        notes.append(f"{scores.missing:,} questions without a prediction count 0.")
    if scores.unscored:
        notes.append(f"{scores.unscored:,} questions without a reference that counts are left out.")
    return Table(title, ["category", "n", *scores.per_question], rows, " ".join(notes))


def _values(scores: Scores, scorer: str, category: str | None):
    per_question = scores.per_question[scorer]
    return per_question if category is None else scores.of_category(scorer, category)


def _print(text: str, file: IO[str] | None = None) -> None:
    """Prints the text, by default on stdout; nothing more once the reader, such as `head`, has
    gone."""
    try:
        print(text, file=file, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


# What scores are called in reports and tables; JSON and flags keep their identifiers.
#
# An identifier names scorer and variant (`webqa_acc/no_lemma`), which figures in papers lack. A
# person reads "answer accuracy (WebQA, no lemmatizer)", with the identifier behind it.


_NAMES = {
    "webqa_acc/official": "answer accuracy (WebQA)",
    "webqa_acc/no_lemma": "answer accuracy (WebQA, no lemmatizer)",
    "webqa_acc/approx": "answer accuracy (WebQA, reference as keywords)",
    "webqa_acc/approx_no_lemma": "answer accuracy (WebQA, reference as keywords, no lemmatizer)",
    "exact_match/official": "exact match",
    "exact_match/no_lemma": "exact match (no lemmatizer)",
    "webqa_fl/official": "fluency (WebQA)",
    "webqa_fl/paper_eq1": "fluency (WebQA, equation 1)",
    "webqa_fl_acc/official": "fluency × accuracy (WebQA)",
    "source_f1/official": "source F1 (WebQA)",
    "source_f1/notebook": "source F1 (authors' notebook)",
    "source_f1/clip_notebook": "source F1 (authors' CLIP notebook)",
    "source_f1": "source F1",
    "source_f1@0.2": "source F1 at threshold 0.2",
    "citation_precision": "citation precision",
    "citation_recall": "citation recall",
    "refused/answerable": "refused, though a source answers",
    "refused/unanswerable": "refused, no source answers",
    "modality_accuracy": "modality accuracy",
    "mrr": "mean reciprocal rank",
    "article_mrr": "mean reciprocal rank of the right article",
    "vqa_accuracy/official": "VQA accuracy (official)",
    "vqa_accuracy/soft_labels": "VQA accuracy (soft labels)",
    "vqa_accuracy/official_from_soft_labels": "VQA accuracy (official, from soft labels)",
    "vqa_accuracy/paper": "VQA accuracy (formula of papers)",
    "vqa_accuracy/prophet": "VQA accuracy (Prophet's code)",
    "vqa_accuracy/kat": "VQA accuracy (KAT's code)",
    "a_okvqa_da/official": "direct-answer accuracy (A-OKVQA)",
    "a_okvqa_mc/official": "multiple-choice accuracy (A-OKVQA)",
    "choice_accuracy/recorded_choice": "choice accuracy",
    "scienceqa/recorded_choice": "accuracy (ScienceQA, recorded choice)",
    "scienceqa/letter_or_wrong": "accuracy (ScienceQA, no letter is wrong)",
    "scienceqa/letter_or_random": "accuracy (ScienceQA, no letter is drawn)",
    "scienceqa/letter_or_expected": "accuracy (ScienceQA, no letter counts as chance)",
    "mmbench/vanilla": "accuracy (MMBench, one pass)",
    "mmbench/circular": "accuracy (MMBench, all passes)",
    "mmbench/vanilla_2026": "accuracy (MMBench, one pass, rule of 2026)",
    "mmbench/circular_2026": "accuracy (MMBench, all passes, rule of 2026)",
    "seed_bench/letter": "accuracy (SEED-Bench, letter)",
    "seed_bench/likelihood": "accuracy (SEED-Bench, likelihood)",
    "infoseek/official": "accuracy (InfoSeek)",
    "evqa/exact_match": "exact match (Encyclopedic-VQA)",
    "evqa/bem": "accuracy by BEM (Encyclopedic-VQA)",
    "vidore/official": "nDCG (ViDoRe)",
    "bright/ndcg@10": "nDCG@10 (BRIGHT)",
    "mmlongbench/score": "score (MMLongBench-Doc)",
    "citevqa/saa": "strict attributed accuracy (CiteVQA)",
    "citevqa/recall": "recall of rectangles (CiteVQA)",
    "citevqa/zone_f1": "F1 of cited areas",
    "dynvqa/recall": "F1-Recall (Dyn-VQA)",
    "mmsearch/f1": "F1 (MMSearch)",
    "fvqa/em": "exact match (FactualVQA)",
    "fvqa/sub_em": "answer within the response (FactualVQA)",
    "livevqa/em": "exact match (LiveVQA)",
    "livevqa/sub_em": "answer within the response (LiveVQA)",
    "mmeb/hit@1": "hit@1 (MMEB)",
    "mbeir/official": "recall of any positive (M-BEIR)",
    "mmmu/official": "accuracy (MMMU, no letter is drawn)",
    "mmmu/unparsed_wrong": "accuracy (MMMU, no letter is wrong)",
    "mathvista/official": "accuracy (MathVista)",
    "mathvista/empty_wrong": "accuracy (MathVista, an empty answer is wrong)",
    "mragbench/rule": "accuracy (MRAG-Bench)",
    "mmmu/letter": "accuracy (MMMU, the letter alone)",
    "multimodalqa/list_em": "exact match (MultimodalQA)",
    "multimodalqa/list_f1": "F1 (MultimodalQA)",
}
# Families whose variants depend on weights or on k.
_FAMILIES = (
    (re.compile(r"webqa_fl_acc/(\w+)"), "fluency × accuracy (WebQA, {})"),
    (re.compile(r"webqa_fl/paper_eq1_(\w+)"), "fluency (WebQA, equation 1, {} weights)"),
    (re.compile(r"webqa_fl/(\w+)"), "fluency (WebQA, {} weights)"),
    (re.compile(r"article_recall@(\d+)"), "the right article in the top {}"),
    (re.compile(r"vidore/ndcg@(\d+)"), "nDCG@{} (ViDoRe)"),
    (re.compile(r"mbeir/recall@(\d+)"), "a positive in the top {} (M-BEIR)"),
    (re.compile(r"ndcg@(\d+)"), "nDCG@{}"),
    (re.compile(r"hit_any@(\d+)"), "a gold source in the top {}"),
    (re.compile(r"hit_all@(\d+)"), "all gold sources in the top {}"),
)


def score_name(identifier: str) -> str:
    """A score's name for people: `webqa_acc/no_lemma` is "answer accuracy (WebQA, no lemmatizer)".

    Of an identifier that is not known (a scorer of one's own) the identifier itself.
    """
    if identifier in _NAMES:
        return _NAMES[identifier]
    for pattern, name in _FAMILIES:
        if match := pattern.fullmatch(identifier):
            return name.format(match[1].replace("_", " "))
    return identifier


def for_people(text: str) -> str:
    """A heading or a cell with the identifiers in it, as whole words, replaced by their names."""
    return " ".join(map(score_name, text.split(" ")))


def identifiers_in(texts: Iterable[str]) -> dict[str, str]:
    """Name -> identifier of all scores that are named in the texts, in order of appearance."""
    words = (word for text in texts for word in text.split(" "))
    return {name: word for word in words if (name := score_name(word)) != word}
