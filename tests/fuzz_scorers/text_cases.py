"""Short answers as InfoSeek, Encyclopedic-VQA, SQuAD and MultiModalQA compare them."""

import random
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from mmqa_jax.benchmarks.evqa import ITEMS, TYPES, is_exact
from mmqa_jax.benchmarks.infoseek import (
    RANGE,
    UNSEEN,
    is_right,
    read_infoseek_predictions,
    score_infoseek,
)
from mmqa_jax.benchmarks.multimodalqa import (
    ANSWER_LIST,
    ANSWER_MODALITY,
    read_multimodalqa_predictions,
    score_multimodalqa,
)
from mmqa_jax.data.schema import Question
from mmqa_jax.evaluation.multiple_choice import list_em, list_f1
from mmqa_jax.evaluation.vqa import squad_exact_match
from tests.fuzz_scorers import traps
from tests.fuzz_scorers.case import Case, Known, Score
from tests.fuzz_scorers.files import written
from tests.fuzz_scorers.official import definitions

_NUMBERS = (
    *(
        "12",
        "1,234.5",
        "-5",
        "3-4",
        "about",
        "0.5",
        "1e3",
        ".7",
        "5.",
        "2 to 3",
        "-",
        "10,20",
        "1.2.3",
    ),
    *(
        "x²-3",
        "７",
        "+3",
        "12-",
        "1990",
        "km",
        "-.2.3",
        "1e400",
        "9-10",
        "1,00",
        "3–4",
        "1e-3",
        "e5",
        "%",
    ),
)
# Numbers of two periods at which InfoSeek's script stops.
_STOPS = re.compile(r"[-+]\.\d+(?:,\d{3})*\.(?:\d+(?:[eE][-+]?\d+)?|[eE][-+]?\d+)")
_BOUNDS = (-5.0, -1.0, 0.0, 0.5, 2.7, 3.0, 4.0, 12.0, 1100.0, 1234.5, 2000.0)
_HALVES = ("unseen_question", "unseen_entity")
_SINGLE, _MULTIPLE = ("TextQ", "TableQ"), ("Compose(TextQ,TableQ)", "Intersect(TableQ,TextQ)")
_PLACES = ("text", "table", "image")


def _draw_texts(draw: random.Random) -> dict[str, Any]:
    answers = [traps.text(draw, most=3) for _ in range(draw.randint(1, 4))]
    return {"said": traps.answer(draw, answers), "answers": answers}


def _official_squad(name: str) -> Callable[[Path], Score]:
    """The best exact match over references."""

    def opened(file: Path) -> Score:
        match = getattr(definitions(file, name), name)
        return lambda given: float(max(match(given["said"], one) for one in given["answers"]))

    return opened


def _squad(given: dict[str, Any]) -> float:
    return squad_exact_match(given["said"], given["answers"])


def boundaries_differ(texts: Iterable[str]) -> bool:
    """Whether Python and the package regex find other articles, as beside a combining accent."""
    import regex

    articles = r"\b(a|an|the)\b"
    lower = map(str.lower, texts)
    return any(re.findall(articles, text) != regex.findall(articles, text) for text in lower)


def _texts_boundaries_differ(given: dict[str, Any]) -> bool:
    return boundaries_differ([given["said"], *given["answers"]])


def _draw_infoseek(draw: random.Random) -> dict[str, Any]:
    """A question of one of the three types; a numerical one's answer is a range."""
    kind = draw.choice(("string", "time", "numerical", "numerical"))
    if kind != "numerical":
        return {"kind": kind, **_draw_texts(draw), "half": draw.choice(_HALVES)}
    low, high = sorted(draw.sample(_BOUNDS, 2))
    said = traps.text(draw, _NUMBERS, most=4)
    if draw.random() < 0.5:
        quarter = (high - low) / 4
        first, second = (low + quarter * draw.randint(-2, 6) for _ in range(2))
        said = draw.choice(("{} - {}", "{}-{}", "{} to {}", "{}")).format(first, second)
    return {"kind": kind, "said": said, "answers": [low, high], "half": draw.choice(_HALVES)}


def _draw_infoseek_file(draw: random.Random) -> list[dict[str, Any]]:
    """Questions of both halves, without numbers at which the script stops."""
    rows = [_draw_infoseek(draw) for _ in range(draw.randint(2, 20))]
    return [
        {**row, "said": row["said"].replace("-.", "- ."), "half": _HALVES[number % 2]}
        for number, row in enumerate(rows)
    ]


def _references(given: list[dict[str, Any]]) -> tuple[list[Any], list[Any]]:
    """The lines of both official reference files."""
    references = [
        {
            "data_id": str(number),
            "data_split": f"val_{row['half']}",
            "answer_eval": [{"range": row["answers"]}]
            if row["kind"] == "numerical"
            else row["answers"],
        }
        for number, row in enumerate(given)
    ]
    kinds = [
        {"data_id": str(number), "question_type": row["kind"].title()}
        for number, row in enumerate(given)
    ]
    return references, kinds


def _official_infoseek(file: Path) -> Score:
    official = definitions(file, "prepare_qid2example", "evaluation")

    def score(given: dict[str, Any]) -> bool:
        examples = official.prepare_qid2example(*_references([given]))
        said = [{"data_id": "0", "prediction": given["said"]}]
        (found,) = (one for kind in official.evaluation(said, examples) for one in kind)
        return bool(found)

    return score


def _infoseek_question(name: str, row: dict[str, Any]) -> Question:
    extra: dict[str, Any] = {UNSEEN: row["half"]}
    if row["kind"] == "numerical":
        extra[RANGE] = row["answers"]
        return Question(name, "val", "?", category=row["kind"], extra=extra)
    return Question(
        name, "val", "?", answers=tuple(row["answers"]), category=row["kind"], extra=extra
    )


def _at_infoseeks_error(file: Path) -> Score:
    """At `-.2.3` the script stops; it counts as no number."""
    official = _official_infoseek(file)
    spaced = definitions(file, "clean_str_range").clean_str_range

    def score(given: dict[str, Any]) -> bool:
        return official({**given, "said": _STOPS.sub(" ", spaced(given["said"]))})

    return score


def _official_infoseek_file(file: Path) -> Score:
    official = definitions(file, "prepare_qid2example", "evaluate_infoseek_full")

    def score(given: list[dict[str, Any]]) -> dict[str, str]:
        examples = official.prepare_qid2example(*_references(given))
        halves = [
            [
                {"data_id": str(number), "prediction": row["said"]}
                for number, row in enumerate(given)
                if row["half"] == half
            ]
            for half in _HALVES
        ]
        found = official.evaluate_infoseek_full(halves, [examples, examples])
        scores = {half: f"{found[f'{half}_score']['score']:.2f}" for half in _HALVES}
        return {**scores, "final": f"{found['final_score']:.2f}"}

    return score


def _infoseek_file(given: list[dict[str, Any]]) -> dict[str, str]:
    questions = [_infoseek_question(str(n), row) for n, row in enumerate(given)]
    said = [{"data_id": str(n), "prediction": row["said"]} for n, row in enumerate(given)]
    with written(said=said) as (path,):
        predictions = read_infoseek_predictions(path, questions)
    evaluation = score_infoseek(questions, predictions)
    (scores,) = evaluation.scored
    found = {
        half: f"{round(100 * scores.by_category[half.replace('_', ' ')]['infoseek/official'], 2):.2f}"
        for half in _HALVES
    }
    return {**found, "final": evaluation.notes[0].split()[-2]}


def _draw_evqa(draw: random.Random) -> dict[str, Any]:
    kind = draw.choice((*TYPES, "multi_answer"))
    if kind != "multi_answer":
        given = _draw_texts(draw)
        prefix = "<extra_id_0> " if draw.random() < 0.1 else ""
        return {**given, "said": f"{prefix}{given['said']}", "kind": kind}
    items = [traps.text(draw, most=2) for _ in range(draw.randint(1, 4))]
    answers = [ITEMS.join(items), ITEMS.join(draw.sample(items, draw.randint(1, len(items))))]
    said = [traps.near(draw, one) for one in items if draw.random() < 0.8]
    glue = draw.choice((", ", ",", " and ", " & ", "&", "; "))
    return {"said": glue.join(said), "answers": answers, "kind": kind}


def _official_evqa(file: Path, *, errors: bool = False) -> Score:
    """Whether any alternative matches; with `errors` those that stop the script do not."""
    official = definitions(file, "exact_match_scoring_function")

    def matches(said: str, alternative: str, kind: str) -> bool:
        example = {"question_type": kind, "reference": alternative, "candidate": said}
        try:
            return official.exact_match_scoring_function(example)
        except ValueError:
            if not errors:
                raise
            return False

    return lambda given: max(matches(given["said"], one, given["kind"]) for one in given["answers"])


def _evqa(given: dict[str, Any]) -> bool:
    question = Question("q", "test", "?", answers=tuple(given["answers"]), category=given["kind"])
    return is_exact(given["said"], question)


def _draw_lists(draw: random.Random) -> dict[str, Any]:
    """Predicted items and the answer's: some of these, in another order, changed, and others."""
    gold = [traps.text(draw, most=3) for _ in range(draw.choice((1, 1, 2, 3, 5)))]
    said = [traps.near(draw, one) if draw.random() < 0.5 else one for one in gold]
    draw.shuffle(said)
    said = said[draw.choice((0, 0, 0, 1)) :] + [traps.text(draw)] * draw.choice((0, 0, 0, 1))
    return {"said": said, "gold": gold}


def _official_lists(file: Path, **given: Any) -> Score:
    official = definitions(file, "list_em", "list_f1", **given)
    return lambda row: [official.list_em(*row.values()), official.list_f1(*row.values())]


def _word_to_num(word: str) -> int:
    """word2number's, which at some words ends with other errors than that of no number."""
    from word2number.w2n import word_to_num

    try:
        return word_to_num(word)
    except Exception as error:
        raise ValueError(str(error)) from error


def _draw_lists_file(draw: random.Random) -> list[dict[str, Any]]:
    """Questions without words at which the official script stops."""
    rows = []
    for _ in range(draw.randint(1, 20)):
        row = _draw_lists(draw)
        said = row["said"] or ["dog"]
        said = said[0] if len(said) == 1 and draw.random() < 0.5 else said
        kind, place = draw.choice((*_SINGLE, *_MULTIPLE)), draw.choice(_PLACES)
        rows.append({"said": said, "gold": row["gold"], "kind": kind, "place": place})
    return rows


def _official_lists_file(file: Path) -> Score:
    evaluate = definitions(file, "evaluate_predictions", word_to_num=_word_to_num)
    kinds = definitions(file.with_name("common_utils.py"), "MULTI_HOP_QUESTION_TYPES")
    multiple = kinds.MULTI_HOP_QUESTION_TYPES

    def score(given: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
        said = {str(n): row["said"] for n, row in enumerate(given) if n % 7 != 6}
        gold = {str(n): [row["gold"]] for n, row in enumerate(given)}
        groupings: tuple[Callable[[dict[str, Any]], str], ...] = (
            lambda row: row["kind"],
            lambda row: f"answer in {row['place']}",
            lambda row: "multi-modal" if row["kind"] in multiple else "single-modal",
        )
        found = {}
        for group in groupings:
            names = {str(n): group(row) for n, row in enumerate(given)}
            overall, _, by_name = evaluate.evaluate_predictions(said, gold, names)
            found |= {"all": overall, **by_name}
        return found

    return score


def _lists_file(given: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    questions = [
        Question(
            str(n),
            "val",
            "?",
            category=row["kind"],
            extra={ANSWER_LIST: row["gold"], ANSWER_MODALITY: row["place"]},
        )
        for n, row in enumerate(given)
    ]
    said = {str(n): row["said"] for n, row in enumerate(given) if n % 7 != 6}
    with written(said=said) as (path,):
        predictions = read_multimodalqa_predictions(path, questions)
    (scores,) = score_multimodalqa(questions, predictions).scored
    groups = {"all": scores.scores, **scores.by_category}
    return {
        name: {scorer.partition("/")[2]: 100 * value for scorer, value in found.items()}
        for name, found in groups.items()
    }


_INFOSEEK = ("edchengg/infoseek_eval", "infoseek_eval.py")
_MULTIMODALQA = ("allenai/multimodalqa", "baselines/evaluate.py")
CASES = (
    Case(
        "squad",
        "allenai/multimodalqa",
        "baselines/text_qa/squad_metrics.py",
        draw=_draw_texts,
        official=_official_squad("compute_exact"),
        ours=_squad,
    ),
    Case(
        "squad_fid",
        "facebookresearch/FiD",
        "src/evaluation.py",
        draw=_draw_texts,
        official=_official_squad("exact_match_score"),
        ours=_squad,
        known=(
            Known("FiD's word boundaries are those of the package regex", _texts_boundaries_differ),
        ),
    ),
    Case(
        "infoseek",
        *_INFOSEEK,
        draw=_draw_infoseek,
        official=_official_infoseek,
        ours=lambda given: is_right(given["said"], _infoseek_question("0", given)),
        at_error=_at_infoseeks_error,
    ),
    Case(
        "infoseek_file",
        *_INFOSEEK,
        draw=_draw_infoseek_file,
        official=_official_infoseek_file,
        ours=_infoseek_file,
        rows=10,
    ),
    Case(
        "evqa",
        "google-research/google-research",
        "encyclopedic_vqa/evaluation_utils.py",
        draw=_draw_evqa,
        official=_official_evqa,
        ours=_evqa,
        at_error=lambda file: _official_evqa(file, errors=True),
    ),
    Case(
        "multimodalqa",
        *_MULTIMODALQA,
        draw=_draw_lists,
        official=_official_lists,
        ours=lambda given: [list_em(*given.values()), list_f1(*given.values())],
        at_error=lambda file: _official_lists(file, word_to_num=_word_to_num),
    ),
    Case(
        "multimodalqa_file",
        *_MULTIMODALQA,
        draw=_draw_lists_file,
        official=_official_lists_file,
        ours=_lists_file,
        rows=10,
        tolerance=1e-10,  # of percentages, which both add up in another order
    ),
)
