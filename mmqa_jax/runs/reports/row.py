"""The report of a row: its questions as cards, scores and tables; of a finished run, made anew;
of a folder of rows; and the page of what late interaction matched."""

from __future__ import annotations

import dataclasses
import html
import io
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import numpy as np

from mmqa_jax.benchmarks import NAMES
from mmqa_jax.benchmarks.benchmark import open_benchmark
from mmqa_jax.core.errors import UserError
from mmqa_jax.core.files import atomic_write, read_json, read_jsonl
from mmqa_jax.core.workdir import read_config
from mmqa_jax.data.corpus import Corpus, open_corpus
from mmqa_jax.data.pictures.decode import decode
from mmqa_jax.data.pictures.store import PictureStore
from mmqa_jax.data.records.corpus_records import materials_of
from mmqa_jax.data.schema import Prediction, Question, Ranking, is_answerable, united
from mmqa_jax.evaluation import report
from mmqa_jax.evaluation.compare import ScoredRun, compare_tables, format_p, read_run
from mmqa_jax.evaluation.report import picture_uri
from mmqa_jax.evaluation.scores import Scores, hop_groups, read_answers
from mmqa_jax.evaluation.scoring import Evaluation, losses_tables
from mmqa_jax.evaluation.significance import Interval
from mmqa_jax.evaluation.tables import Cell, Table, llm_columns, llm_use, score_cell, score_name
from mmqa_jax.retrieval.rankings import read_rankings
from mmqa_jax.runs import traces as row_traces
from mmqa_jax.runs.row import Row, recorded_row
from mmqa_jax.runs.traces import agent_summary, agent_tables, reference_rows

if TYPE_CHECKING:
    from mmqa_jax.retrieval.embedder import Embedder
    from mmqa_jax.retrieval.page_embedder import PageTokenEmbedder


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


MATCHES = "matches.html"  # in a row's workdir, see write_matches
# What the scores that are shown large begin with, beside a benchmark's own.
_HEADLINE = (
    *("webqa_acc", "exact_match", "source_f1/official", "recall@20", "vqa_accuracy"),
    "choice_accuracy",
)
# Before a benchmark's own verdicts, where options were ranked.
_CHOSEN = ("scienceqa/recorded_choice",)
_REFUSED = "refused/"  # scores of all questions of their kind
_RANKINGS = ("relevance", "candidates")


def row_title(scores: Mapping[str, Any]) -> str:
    """`webqa, val: vlp (first 100 questions)`."""
    title = f"{scores['dataset']}, {scores['split']}: {scores['row']}"
    if scores["limit"] is not None:
        title += f" (first {scores['limit']} questions)"
    return title


@dataclasses.dataclass
class RowRun:
    """A row's answers to its questions, and their scores."""

    corpus: Corpus
    questions: Sequence[Question]
    predictions: Sequence[Prediction]
    # `candidates` of the retriever and `relevance` of the reranker, if the row has them.
    rankings: Mapping[str, Sequence[Ranking]]
    evaluation: Evaluation
    scores: dict[str, Any] = dataclasses.field(default_factory=dict)  # the content of scores.json


def write_row_report(folder: Path, run: RowRun) -> list[Table]:
    """Writes a row's report.html; returns the tables in it."""
    scores, count = run.scores, len(run.questions)
    tables = run.evaluation.tables(row_title(scores)) + agent_tables(agent_summary(run.predictions))
    tables += row_traces.counts_table(scores.get("prompts", {}))
    if "llm" in scores:
        tables.append(_cost_table(scores["llm"]))
    tables += losses_tables(scores)
    if (folder / MATCHES).exists():
        note = "What of their best pages the first questions matched, as maps."
        tables.append(Table("Late interaction", ("page",), [[MATCHES]], note, links={0: MATCHES}))
    scorer = verdict_scorer(scores["dataset"], run.evaluation, run.predictions)
    recall = {
        int(name.partition("@")[2]): value
        for name, value in scores["scores"].items()
        if name.startswith("recall@")
    }
    large = _HEADLINE
    if scores["dataset"] in NAMES:
        large += tuple(filter(None, [open_benchmark(scores["dataset"]).headline]))
    cards = row_cards(run, scorer)
    data = report.ReportData(
        title=row_title(scores),
        description=f"{count:,} questions.{report.how_many(cards, count)}",
        notice="; ".join(scores["notes"]),
        headline={
            name: value for name, value in scores["scores"].items() if name.startswith(large)
        },
        cards=cards,
        card_note=verdict_note(scorer),
        tables=tables,
        recall={scores["row"]: recall} if recall else {},
        facts=row_facts(folder) | run_facts(folder, run.corpus),
        materials=materials_of(scores),
    )
    report.write_report(folder / "report.html", data)
    return tables


def row_cards(run: RowRun, scorer: str) -> list[report.Card]:
    """The questions of a row, the best first; of more than MOST_CARDS some of every category.

    These are right, wrong and partly right ones in turn; the others follow in brief, the wrong
    ones first. The `scorer` tells right from wrong.
    """
    questions, predictions = run.questions, run.predictions
    ranked = next((run.rankings[name] for name in _RANKINGS if run.rankings.get(name)), None)
    per_question = run.evaluation.per_question()
    scored = [per_question.get(question.id, {}) for question in questions]
    scores = [of_question.get(scorer) for of_question in scored]
    kinds = [
        (report.verdict(score), question.category)
        for score, question in zip(scores, questions, strict=True)
    ]
    picked = report.in_turn(kinds, report.MOST_CARDS)

    def answer(i: int) -> report.CardAnswer:
        return report.CardAnswer("", answer_text(predictions[i]), scores[i], scored[i])

    maker = report.CardMaker(run.corpus)
    cards = []
    for i in maker.best_first(questions, predictions, scores, picked):
        question, prediction = questions[i], predictions[i]
        cards.append(
            maker.card(
                question,
                [answer(i)],
                ranked[i] if ranked else None,
                [prediction.sources],
                prediction.read,
                rows=[
                    *row_traces.reference_rows(question),
                    *row_traces.answer_rows(question, prediction),
                ],
                picture=run.corpus.question_picture(question),
                details=row_traces.trace_details(prediction.trace),
                tree=row_traces.trace_tree(prediction),
            )
        )
    others = sorted({*range(len(questions))} - {*picked}, key=lambda i: (scores[i] or 0, i))
    return cards + report.that_fit(
        report.brief_card(questions[i], [answer(i)], row_traces.reference_rows(questions[i]))
        for i in others
    )


def answer_text(prediction: Prediction) -> str:
    """The answer as a card shows it; of a row that only finds sources what it did."""
    if prediction.answer or prediction.trace or not prediction.sources:
        return prediction.answer
    return f"{len(prediction.sources)} sources found"


def verdict_note(scorer: str) -> str:
    """Explains when an answer counts as right."""
    return f"Right answers first. Right: {scorer} of 1; wrong: of 0." if scorer else ""


def verdict_scorer(dataset: str, evaluation: Evaluation, predictions: Sequence[Prediction]) -> str:
    """The scorer by which the report calls an answer right or wrong; "" without scores.

    It reads the answer that is shown: no random draw, no other pass of the question. Of options
    that a model ranked, the choice itself counts.
    """
    known = [name for scores in evaluation.scored for name in scores.per_question]
    preferred = open_benchmark(dataset).verdicts if dataset in NAMES else ()
    if any("option_scores" in prediction.trace for prediction in predictions):
        preferred = (*_CHOSEN, *preferred)
    return next((name for name in (*preferred, *known) if name in known), "")


def row_facts(folder: Path) -> dict[str, str]:
    """Returns setting, options and models of the row in `folder`, with its config's changes."""
    config = read_config(folder)
    options = ", ".join(f"{name}={value}" for name, value in config.options.items())
    models = {
        f"model of {name}": part.model for name, part in config.parts.items() if part.get("model")
    }
    return {
        "setting": f"{config.system}, {config.setting}",
        "options": options or "the setting's own",
        **models,
    }


def run_facts(folder: Path, corpus: Corpus | None = None) -> dict[str, str]:
    """When, where and with which code (and on which corpus) the run in `folder` was made."""
    run = read_json(folder / "config.json")
    device = run.get("devices", {})
    return {
        "started": run["started"],
        "device": f"{device.get('count', '?')} x {device.get('kind', '?')}",
        "host": f"{run['host']['cpus']} CPU cores, Python {run['host']['python']}",
        "jax": run["versions"].get("jax", "?"),
        "commit": run["git"]["commit"][:10] if run.get("git") else "not from a checkout",
        **({} if corpus is None else {"corpus": corpus.fingerprint[:16]}),
    }


def _cost_table(cost: Mapping[str, float]) -> Table:
    """Calls and tokens of the language model, per question and in all."""
    names = ["calls", "prompt_tokens", "completion_tokens"]
    names += ["thinking_tokens"] if cost.get("thinking_tokens") else []
    rows = [[name.replace("_", " "), cost[f"{name}_per_question"], cost[name]] for name in names]
    return Table("Language model", ("cost", "per question", "all questions"), rows)


# Of a finished run.


def report_row(folder: Path) -> tuple[Path, list[Table]]:
    """Writes the report of the finished row in `folder` anew; returns its path and its tables."""
    run = read_run(folder)
    scores = {"notes": [], "limit": None, **run.scores}
    row = recorded_row(folder)
    for place in filter(None, (row.data.dir, row.data.sources)):
        if not Path(place).is_dir():
            raise UserError(
                f"{folder}: its data is not at {os.fspath(place)}, seen from here; start `mmqa "
                "report` where the run was started."
            )
    corpus = row.open_corpus()
    asked = {question.id: question for question in row.questions(corpus)}
    predictions = _predictions(folder)
    unknown = [
        prediction.question_id for prediction in predictions if prediction.question_id not in asked
    ]
    if unknown:
        raise UserError(
            f"{folder}: the data at {row.data.dir} has no question {unknown[0]!r}, which the run "
            "answered (it was prepared anew since); run the row again."
        )
    questions = [asked[prediction.question_id] for prediction in predictions]
    ids = [question.id for question in questions]
    files = {name: folder / "retrieval" / f"{name}.jsonl" for name in _RANKINGS}
    rankings = {
        name: read_rankings(file, ids, corpus.row) for name, file in files.items() if file.exists()
    }
    if "materials" not in scores:  # of an older run
        scores["materials"] = list(map(dataclasses.asdict, row.materials(corpus)))
    evaluation = _evaluation(row, questions, predictions, run.per_question)
    made_anew = RowRun(corpus, questions, predictions, rankings, evaluation, scores)
    return folder / "report.html", write_row_report(folder, made_anew)


def _predictions(folder: Path) -> list[Prediction]:
    """predictions.jsonl with the traces of trace.jsonl."""
    file = folder / "trace.jsonl"
    traces = {line["question_id"]: line for _, line in read_jsonl(file)} if file.exists() else {}
    return [
        dataclasses.replace(prediction, trace=traces.get(prediction.question_id, {}))
        for prediction in read_answers(folder / "predictions.jsonl")
    ]


def _evaluation(
    row: Row,
    questions: Sequence[Question],
    predictions: Sequence[Prediction],
    per_question: Mapping[str, Mapping[str, float]],
) -> Evaluation:
    """The scores of per_question.jsonl; a benchmark's, which has groups of its own, anew."""
    names = dict.fromkeys(name for scores in per_question.values() for name in scores)
    evaluation = Evaluation()
    evaluation.has_modalities = not any(p.choice is not None for p in predictions)
    if row.dataset in NAMES:
        evaluation.has_modalities = False
        benchmark = open_benchmark(row.dataset)
        if names and (row.answers or benchmark.ranks):
            evaluation = benchmark.score(questions, predictions)
        anew = {name for scores in evaluation.all for name in scores.per_question}
        names = dict.fromkeys(name for name in names if name not in anew)
    by_questions: dict[tuple[str, ...], dict[str, np.ndarray]] = {}
    for name in names:
        ids = tuple(q.id for q in questions if name in per_question.get(q.id, {}))
        values = np.array([per_question[question_id][name] for question_id in ids], float)
        by_questions.setdefault(ids, {})[name] = values
    by_id = {question.id: question for question in questions}
    asked = sum(is_answerable(question) or not row.answers for question in questions)
    for ids, values in by_questions.items():
        for kind in dict.fromkeys(map(_kind, values)):
            of_kind = {name: x for name, x in values.items() if _kind(name) == kind}
            unscored = 0 if _REFUSED in next(iter(of_kind)) else asked - len(ids)
            scored = [by_id[question_id] for question_id in ids]
            scores = Scores(
                ids,
                tuple(question.category for question in scored),
                of_kind,
                unscored=unscored,
                groups=hop_groups(scored),
            )
            if kind == "retrieval":
                evaluation.retrieval = scores
            else:
                getattr(evaluation, kind).append(scores)
    return evaluation


def _kind(scorer: str) -> str:
    """Returns the name of the Evaluation's list that a scorer is in."""
    if scorer == "mrr" or scorer.startswith("recall@"):
        return "retrieval"
    return "attribution" if scorer.startswith(("citation_", _REFUSED)) else "scored"


# The report of a folder of rows: which scores best, with a link to each row's own report.


_MOST_COLUMNS = 8
_OF_SOURCES = ("source_f1", "recall@", "mrr", "modality_")  # rows that answer nothing


def report_rows(
    folder: Path, rows_in: str = ".", page: report.ReportData | None = None
) -> tuple[Path, list[Table]]:
    """Writes `folder`/report.html of all finished rows below it; returns its path and tables.

    Args:
      folder: of the report.
      rows_in: the folder in it that has the rows.
      page: what else stands on the page, beside the rows.
    """
    from mmqa_jax.runs.status import finished_rows

    place = folder / rows_in
    rows = finished_rows(place)
    groups: dict[tuple[str, str, str], dict[str, Mapping[str, Any]]] = {}
    for name, scores in rows.items():
        scorer = next(iter(scores["scores"]), "")
        key = (str(scores["dataset"]), str(scores.get("split")), scorer)
        groups.setdefault(key, {})[name] = scores
    tables, bars = [], {}
    answers_first = sorted(groups.items(), key=lambda keyed: keyed[0][2].startswith(_OF_SOURCES))
    for (dataset, split, scorer), group in answers_first:
        if not scorer:
            continue
        names = sorted(group, key=lambda name: -group[name]["scores"][scorer])
        title = f"{dataset}, {split}: {scorer}"
        if len(names) > 1:
            bars[title] = [
                report.Bar(name, score_cell(group[name], scorer), _link(place, name, folder))
                for name in names
            ]
        tables.append(_table(place, folder, title, {name: group[name] for name in names}))
    page = page or report.ReportData(
        title=f"{'/'.join(folder.resolve().parts[-2:])}: {len(rows)} rows",
        description="The best first; a row's name leads to its report.",
    )
    tables += page.tables
    materials = united(*map(materials_of, rows.values()))
    data = dataclasses.replace(page, bars=bars, tables=tables, materials=materials)
    report.write_report(folder / "report.html", data)
    return folder / "report.html", tables


def _table(place: Path, folder: Path, title: str, rows: Mapping[str, Mapping[str, Any]]) -> Table:
    """A line per row, a column per score."""
    scorers = list(dict.fromkeys(name for scores in rows.values() for name in scores["scores"]))
    scorers = scorers[:_MOST_COLUMNS]
    used, counts = llm_columns([llm_use(scores) for scores in rows.values()])
    lines: list[list[Cell]] = [
        [name, scores.get("n"), *(score_cell(scores, scorer) for scorer in scorers), *asked]
        for (name, scores), asked in zip(rows.items(), counts, strict=True)
    ]
    links = {i: link for i, name in enumerate(rows) if (link := _link(place, name, folder))}
    note = "95% intervals, bootstrap over questions. mmqa compare tests the differences of rows."
    return Table(title, ("row", "n", *scorers, *used), lines, note, links)


def _link(place: Path, name: str, folder: Path) -> str:
    """The report of the row `name` in `place`, seen from `folder`; "" where it has none."""
    file = place / name / "report.html"
    return f"./{quote(file.relative_to(folder).as_posix())}" if file.is_file() else ""


# The page of `mmqa search --matches`: what of the best page each question matched.


_MOST = 20  # questions on a page
_PIXELS = 900  # of a page's longer side
_STYLE = """body{font:16px/1.4 sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}
img{max-width:100%;border:1px solid #999}td,th{padding:.1rem .8rem .1rem 0;text-align:left}"""


def check_matches(embedder: Embedder) -> PageTokenEmbedder:
    """The embedder; UserError for one whose matches have no places."""
    from mmqa_jax.retrieval.page_embedder import PageTokenEmbedder

    if not isinstance(embedder, PageTokenEmbedder):
        raise UserError(
            "--matches: needs a retriever of pages with a vector for each token, such as ColPali; "
            "leave it out, or name one as --model."
        )
    return embedder


def write_matches(
    out: Path,
    title: str,
    questions: Sequence[Question],
    ranked: Sequence[Ranking],
    *,
    corpus: Corpus,
    embedder: PageTokenEmbedder,
    pictures: PictureStore,
) -> list[dict[str, Any]]:
    """Writes the page; returns its rows for JSON.

    Args:
      out: a file of HTML.
      title: of the page.
      questions: of which the first are shown.
      ranked: their rankings; the best source that is a picture is shown.
      corpus: of the sources.
      embedder: that ranked them.
      pictures: pixels of the corpus, for the embedder.
    """
    from mmqa_jax.retrieval.page_embedder import page_matches

    rows, sections = [], []
    for question, ranking in zip(questions[:_MOST], ranked[:_MOST], strict=True):
        at = [corpus.row[name] for name in ranking.sources]
        pixels = next(((row, p) for row in at if (p := pictures.pixels(row)) is not None), None)
        if pixels is None:
            continue
        source = corpus.sources[pixels[0]]
        matches = page_matches(embedder, question.question, pixels[1])
        tokens = matches.rows()
        rows.append({"question": question.id, "source": source.id, "tokens": tokens})
        picture = decode(corpus.read_picture(source.image) or b"", source.id)
        picture.thumbnail((_PIXELS, _PIXELS))
        encoded = io.BytesIO()
        matches.drawn_on(picture).save(encoded, "PNG")
        sections.append(_section(question, source.id, tokens, encoded.getvalue()))
    name = html.escape(f"What the questions matched: {title}")
    page = (
        '<!doctype html><html lang="en"><meta charset="utf-8">'
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; '
        "img-src data:; style-src 'unsafe-inline'\">"
        f"<title>{name}</title><style>{_STYLE}</style><h1>{name}</h1>"
        "<p>The redder a place of the page, the better it matches a word of the question. "
        "A frame is a word's best place.</p>" + "".join(sections) + "</html>\n"
    )
    with atomic_write(out) as file:
        file.write(page)
    return rows


def write_row_matches(
    folder: Path,
    title: str,
    questions: Sequence[Question],
    predictions: Sequence[Prediction],
    candidates: Sequence[Ranking],
    parts: Sequence[Any],
) -> None:
    """Writes MATCHES into a row's workdir if one of its open parts retrieves pages by the vectors
    of their tokens.

    Args:
      candidates: of the row's retriever; empty: the sources of its predictions are those.
      parts: retrievers, alone or fused with BM25, and others.
    """
    from mmqa_jax.retrieval.page_embedder import PageTokenEmbedder

    for part in parts:
        retriever = getattr(part, "dense", part)
        if isinstance(getattr(retriever, "embedder", None), PageTokenEmbedder):
            ranked = candidates or [
                Ranking(prediction.question_id, prediction.sources, prediction.source_scores)
                for prediction in predictions
            ]
            seen = {"embedder": retriever.embedder, "pictures": retriever.pictures}
            out = folder / MATCHES
            write_matches(out, title, questions, ranked, corpus=retriever.corpus, **seen)
            return


def _section(
    question: Question, source: str, tokens: Sequence[dict[str, Any]], picture: bytes
) -> str:
    cells = "".join(
        f"<tr><td>{html.escape(row['token'])}</td><td>{row['similarity']:.3f}</td>"
        f"<td>{', '.join(f'{100 * side:.0f}' for side in row['box'])}</td></tr>"
        for row in tokens
    )
    return (
        f"<h2>{html.escape(question.question)}</h2><p>{html.escape(source)}</p>"
        f'<img alt="{html.escape(source)}" src="{picture_uri(picture, _PIXELS)}">'
        "<table><tr><th>Token</th><th>Similarity</th>"
        f"<th>Left, top, right, bottom, in percent</th></tr>{cells}</table>"
    )
