"""`mmqa compare --report`: the answers of several runs side by side, question by question."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.files import read_jsonl
from mmqa_jax.core.workdir import read_config
from mmqa_jax.data.corpus import Corpus, open_corpus
from mmqa_jax.data.records.corpus_records import materials_of
from mmqa_jax.data.schema import Question, united
from mmqa_jax.evaluation import report
from mmqa_jax.evaluation.compare import ScoredRun, compare_tables, format_p
from mmqa_jax.evaluation.significance import Interval
from mmqa_jax.evaluation.tables import score_name
from mmqa_jax.runs.traces import reference_rows

_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_NOT_RIGHT = ["partly", "wrong"]


def check_number(runs: int) -> None:
    """UserError for more runs than there are letters for."""
    if runs > len(_LETTERS):
        raise UserError(f"--report: at most {len(_LETTERS)} runs were expected; name fewer.")


def write_comparison(path: Path, runs: Sequence[ScoredRun], compared: Mapping[str, Any]) -> None:
    """Writes a page of runs side by side: their answers, sources and verdicts, and the tests of
    `compare_runs`.

    Questions, references and pictures come from the corpus that the first run names; where it is
    not there, the page has ids in their place and says so.
    """
    check_number(len(runs))
    metric = compared["metric"]
    letters = [letter for letter, _ in zip(_LETTERS, runs, strict=False)]
    answers = [_answers(Path(run.name)) for run in runs]
    corpus, lacking = _corpus(runs[0])
    asked = {question.id: question for question in corpus.questions()}

    def values(name: str) -> list[float | None]:
        return [run.per_question.get(name, {}).get(metric) for run in runs]

    scored = [name for name in runs[0].per_question if None not in values(name)]
    scored.sort(key=lambda name: min(values(name)) - max(values(name)))
    graded = any(0 < value < report.RIGHT for name in scored for value in values(name))
    maker, cards, others = report.CardMaker(corpus), [], []
    for number, name in enumerate(scored):
        question = asked.get(name, Question(name, "", name))
        replies = [of_run.get(name, ("", ())) for of_run in answers]
        of_runs = [
            report.CardAnswer(letter, text, score, run.per_question[name])
            for letter, run, score, (text, _) in zip(
                letters, runs, values(name), replies, strict=True
            )
        ]
        rows = reference_rows(question) if question.answers or question.choices else ()
        if number < report.MOST_CARDS:
            cited = [names for _, names in replies]
            cards.append(maker.card(question, of_runs, None, cited, rows=rows))
        else:
            others.append(report.brief_card(question, of_runs, rows))
    cards += report.that_fit(others)
    data = report.ReportData(
        title=", ".join(map(": ".join, zip(letters, _short(runs), strict=True))),
        description=_summary(compared, letters, len(scored)) + report.how_many(cards, len(scored)),
        notice=lacking,
        headline={
            f"{letter}: {score_name(metric)}": run["score"]
            for letter, run in zip(letters, compared["runs"], strict=True)
        },
        cards=cards,
        filters=_filters(letters, graded=graded),
        card_note=f"Right: {metric} of 1, wrong: less. A source's letters say who cites it.",
        bars={
            metric: [
                report.Bar(f"{letter}: {run['name']}", Interval(run["score"], *run["interval"]))
                for letter, run in zip(letters, compared["runs"], strict=True)
            ]
        },
        tables=compare_tables(compared),
        materials=united(corpus.materials, *(materials_of(run.scores) for run in runs)),
    )
    report.write_report(path, data)


def _summary(compared: Mapping[str, Any], letters: Sequence[str], count: int) -> str:
    """The questions, and of two runs their difference with its test."""
    text = f"{count:,} questions, those first on which the runs differ most."
    if len(letters) == 2:
        (pair,) = compared["pairs"]
        low, high = pair["interval"]
        p_value = format_p(pair["p"])
        order = letters if pair["a"] == compared["runs"][0]["name"] else letters[::-1]
        text += (
            f" {' − '.join(order)}: {pair['difference']:+.3f} [{low:+.3f}, {high:+.3f}], "
            f"p {'' if p_value.startswith('<') else '= '}{p_value} ({pair['test']})."
        )
    return text


def _short(runs: Sequence[ScoredRun]) -> list[str]:
    """The ends of the runs' paths that tell them apart."""
    parts = [Path(run.name).resolve().parts for run in runs]
    for length in range(1, max(map(len, parts)) + 1):
        names = ["/".join(path[-length:]) for path in parts]
        if len(set(names)) == len(names):
            return names
    return [run.name for run in runs]


def _answers(folder: Path) -> dict[str, tuple[str, tuple[str, ...]]]:
    """Question id -> answer and cited sources, of per_question.jsonl."""
    answers = {}
    file = folder / "per_question.jsonl"
    for number, row in read_jsonl(file):
        answer, sources = row.get("answer", ""), row.get("sources", [])
        if not isinstance(answer, str) or not (
            isinstance(sources, list) and all(isinstance(name, str) for name in sources)
        ):
            raise UserError(
                f'{file}, line {number}: expected a text "answer" and a list of ids "sources"; run '
                "`mmqa run` again."
            )
        answers[row["question_id"]] = (answer, tuple(sources))
    return answers


def _corpus(run: ScoredRun) -> tuple[Corpus, str]:
    """The corpus of a run, or an empty one and what the page says of that."""
    file = Path(run.name) / "config.json"
    data = read_config(Path(run.name)).get("data", {}) if file.exists() else {}
    folders = [folder for folder in (data.get("dir"), data.get("sources")) if folder]
    missing = [folder for folder in folders if not Path(folder).is_dir()]
    if missing or not folders:
        place = f"at {missing[0]}, seen from here" if missing else "named by the run"
        return Corpus([]), f"The data is not {place}: questions and sources are shown by their ids."
    return open_corpus(*folders), ""


def _filters(letters: Sequence[str], *, graded: bool) -> list[report.CardFilter]:
    """All, one right and others not, all right, all wrong; of two graded runs which is better."""
    several = len(letters) > 2
    together = "all" if several else "both"
    filters = [report.CardFilter("all", [[]] * len(letters))]
    for number, letter in enumerate(letters):
        others = "others" if several else letters[1 - number]
        wanted = [["right"] if i == number else _NOT_RIGHT for i in range(len(letters))]
        filters.append(report.CardFilter(f"{letter} right, {others} wrong", wanted))
    filters.append(report.CardFilter(f"{together} right", [["right"]] * len(letters)))
    filters.append(report.CardFilter(f"{together} wrong", [_NOT_RIGHT] * len(letters)))
    if graded and not several:
        any_verdict = [[]] * len(letters)
        filters += [
            report.CardFilter(f"{letters[0]} better", any_verdict, 1),
            report.CardFilter(f"{letters[1]} better", any_verdict, -1),
        ]
    return filters
