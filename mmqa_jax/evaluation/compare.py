"""Systems compared question by question: paired bootstrap, permutation and McNemar tests, Holm."""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.files import read_json, read_jsonl
from mmqa_jax.data.formats.tables import real_number
from mmqa_jax.evaluation import significance
from mmqa_jax.evaluation.scores import Scores
from mmqa_jax.evaluation.tables import Cell, Table, llm_columns, llm_use


def compare_scores(
    scored: Sequence[Scores], others: Sequence[Scores]
) -> dict[str, dict[str, float]]:
    """Scorer -> the mean of each system, their difference with its interval, and p-values."""
    others_by_name = {name: x for scores in others for name, x in scores.per_question.items()}
    compared = {}
    for scores in scored:
        for name in scores.per_question.keys() & others_by_name.keys():
            values, other = scores.per_question[name], others_by_name[name]
            compared[name] = {
                "this": float(values.mean()),
                "other": float(other.mean()),
                **dataclasses.asdict(significance.paired_bootstrap(values, other)),
                "p_permutation": significance.permutation_test(values, other),
            }
    return dict(sorted(compared.items()))


def comparison_table(title: str, compared: Mapping[str, Mapping[str, float]]) -> Table:
    """The result of `compare_scores`, one row per scorer."""
    rows: list[list[Cell]] = [
        [
            name,
            row["this"],
            row["other"],
            significance.Interval(row["difference"], row["low"], row["high"]),
            row["p_value"],
            row["p_permutation"],
        ]
        for name, row in compared.items()
    ]
    columns = ("scorer", "this", "other", "difference", "p, bootstrap", "p, permutation")
    return Table(title, columns, rows, "Paired by question; 95% interval, two-sided p-values.")


# Fields of scores.json in which compared runs agree.
SAME = ("dataset", "split", "limit")
_LEAST_P = 1e-300  # smaller p-values underflow


@dataclasses.dataclass(frozen=True)
class ScoredRun:
    """A finished `mmqa run`, as read from its workdir; `per_question` is question id -> scorer ->
    score.
    """

    name: str
    scores: Mapping[str, Any]
    per_question: Mapping[str, Mapping[str, float]]

    @property
    def scorers(self) -> list[str]:
        """The scorers that this run was scored with."""
        return list(self.scores["scores"])


def read_run(folder: Path) -> ScoredRun:
    """Reads scores.json and per_question.jsonl; UserError if `folder` holds no finished run."""
    for name in ("scores.json", "per_question.jsonl"):
        if not (folder / name).exists():
            raise UserError(
                f"{folder}: holds no finished run (no {name}); run `mmqa run --config=FILE:ROW "
                f"--workdir={folder}` to its end, with the config that it was started with."
            )
    scores = read_json(folder / "scores.json")
    if not isinstance(scores, dict) or not (
        isinstance(scores.get("scores"), dict) and isinstance(scores.get("llm", {}), dict | None)
    ):
        raise UserError(f"{folder / 'scores.json'}: was not written by `mmqa run`; run it again.")
    rows = {}
    for number, row in read_jsonl(folder / "per_question.jsonl"):
        if not isinstance(row, dict) or not (
            isinstance(row.get("question_id"), str) and _are_scores(row.get("scores"))
        ):
            raise UserError(
                f"{folder / 'per_question.jsonl'}, line {number}: expected an object with a text "
                '"question_id" and numbers by scorer as "scores"; run `mmqa run` again.'
            )
        rows[row["question_id"]] = row["scores"]
    return ScoredRun(str(folder), scores, rows)


def _are_scores(value: Any) -> bool:
    return isinstance(value, dict) and all(real_number(x) is not None for x in value.values())


def compare_runs(
    runs: Sequence[ScoredRun],
    metric: str | None = None,
    *,
    against_first: bool = False,
    shared: bool = False,
) -> dict[str, Any]:
    """Compares runs by one metric, by default the first scorer that all have: what `mmqa compare`
    prints.

    Pairs are compared by the paired bootstrap and, if all scores are 0 or 1, by McNemar's exact
    test, whose p-value is then the one reported; p_holm is corrected over these pairs (Holm 1979).
    Below 1e-300 a p-value is given as 1e-300; `log10_p` is McNemar's as it is.

    `against_first` compares every other run with the first, instead of every pair; `shared` takes
    only the questions that all runs were scored on, instead of refusing others.
    """
    metric = _check_comparable(runs, metric, ("dataset", "split") if shared else SAME)
    values = {run.name: _values(run, metric) for run in runs}
    questions = _shared_questions(values, metric) if shared else _same_questions(values, metric)
    aligned = {name: np.array([v[q] for q in questions]) for name, v in values.items()}
    binary = all(np.isin(x, (0.0, 1.0)).all() for x in aligned.values())
    pairs = []
    for a, b in _pairs(list(aligned), against_first):
        bootstrap = significance.paired_bootstrap(aligned[a], aligned[b])
        pair: dict[str, Any] = {
            "a": a,
            "b": b,
            "difference": bootstrap.difference,
            "interval": [bootstrap.low, bootstrap.high],
            "p": bootstrap.p_value,
            "test": "bootstrap",
        }
        if binary:
            p_value, logarithm = significance.mcnemar(aligned[a], aligned[b])
            pair |= {"p": p_value, "log10_p": logarithm, "test": "McNemar"}
            pair["p_bootstrap"] = bootstrap.p_value
        pairs.append(pair)
    pairs = _holm(pairs)
    summaries = []
    for run in runs:
        x = aligned[run.name]
        interval = significance.bootstrap_interval(x)
        summary = {
            "name": run.name,
            "n": len(x),
            "score": interval.mean,
            "interval": [interval.low, interval.high],
        }
        summaries.append(summary | llm_use(run.scores))
    return {"metric": metric, "against_first": against_first, "runs": summaries, "pairs": pairs}


def compare_pairs(
    runs: Sequence[ScoredRun], metric: str | None = None, *, shared: bool = False
) -> dict[str, Any]:
    """Compares the second run with the first, the fourth with the third, and so on.

    Each pair has its own questions, of one data set or of several; p_holm is corrected over all of
    these pairs. The result is that of `compare_runs`, with `by_pairs` true; a run in several pairs
    is summarized once.
    """
    if not runs or len(runs) % 2:
        raise UserError(
            f"--pairs: {len(runs)} workdirs are no pairs; name two for each, the one that is "
            "compared with first."
        )
    compared = [
        compare_runs(runs[n : n + 2], metric, against_first=True, shared=shared)
        for n in range(0, len(runs), 2)
    ]
    metrics = list(dict.fromkeys(of_pair["metric"] for of_pair in compared))
    if len(metrics) > 1:
        raise UserError(
            f"--pairs: the pairs are scored by {' and by '.join(metrics)}; give --metric one that "
            "all have."
        )
    summaries = {run["name"]: run for of_pair in compared for run in of_pair["runs"]}
    pairs = _holm([pair for of_pair in compared for pair in of_pair["pairs"]])
    how = {"metric": metrics[0], "against_first": False, "by_pairs": True}
    return {**how, "runs": list(summaries.values()), "pairs": pairs}


def compare_tables(compared: Mapping[str, Any]) -> list[Table]:
    """The result of `compare_runs` or `compare_pairs` as tables: the runs, then the pairs."""
    used, counts = llm_columns(compared["runs"])
    runs: list[list[Cell]] = [
        [run["name"], run["n"], significance.Interval(run["score"], *run["interval"]), *asked]
        for run, asked in zip(compared["runs"], counts, strict=True)
    ]
    pairs: list[list[Cell]] = [
        [
            f"{pair['a']} - {pair['b']}",
            significance.Interval(pair["difference"], *pair["interval"]),
            format_p(pair["p"]),
            format_p(pair["p_holm"]),
            pair["test"],
        ]
        for pair in compared["pairs"]
    ]
    corrected = "the pairs with the first run" if compared["against_first"] else "all pairs"
    corrected = "these pairs" if compared.get("by_pairs") else corrected
    note = f"95% intervals, bootstrap over questions; two-sided p, Holm-corrected over {corrected}."
    return [
        Table(compared["metric"], ("run", "n", "score", *used), runs),
        Table("Differences", ("pair", "difference", "p", "p, Holm", "test"), pairs, note),
    ]


def _holm(pairs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Pairs with their p-values beside those corrected over all of them."""
    corrected = significance.holm([pair["p"] for pair in pairs])
    return [
        pair | {"p": max(pair["p"], _LEAST_P), "p_holm": max(of_all, _LEAST_P)}
        for pair, of_all in zip(pairs, corrected, strict=True)
    ]


def _check_comparable(runs: Sequence[ScoredRun], metric: str | None, same: Sequence[str]) -> str:
    """The metric; UserError if runs differ in one of the fields `same` of scores.json."""
    if len(runs) < 2:
        raise UserError("compare: at least two workdirs were expected; add another run.")
    if len({Path(run.name).resolve() for run in runs}) < len(runs):
        raise UserError("compare: a workdir is named twice; name each once.")
    for key in same:
        for run in runs[1:]:
            if run.scores.get(key) != runs[0].scores.get(key):
                raise UserError(
                    f"{runs[0].name} and {run.name} have different values of {key} ("
                    f"{runs[0].scores.get(key)!r}, {run.scores.get(key)!r}); compare runs over "
                    "the same questions."
                )
    for run in runs:
        if not run.scorers:
            raise UserError(
                f"{run.name}: holds no scores, since the gold answers of its split "
                f"({run.scores.get('split')}) are hidden; compare runs over a split that has them."
            )
    common = [s for s in runs[0].scorers if all(s in run.scorers for run in runs)]
    if metric is None:
        if not common:
            listed = "; ".join(f"{run.name}: {', '.join(run.scorers)}" for run in runs)
            raise UserError(f"compare: the runs have no scorer in common ({listed}).")
        return common[0]
    for run in runs:
        if metric not in run.scorers:
            raise UserError(
                f"--metric={metric}: {run.name} was not scored by it; use one of "
                f"{', '.join(common) or 'none: the runs have no scorer in common'}."
            )
    return metric


def _values(run: ScoredRun, metric: str) -> dict[str, float]:
    return {q: float(scores[metric]) for q, scores in run.per_question.items() if metric in scores}


def _same_questions(values: Mapping[str, Mapping[str, float]], metric: str) -> list[str]:
    """The questions of all runs; UserError if they differ."""
    (first_name, first), *others = values.items()
    for name, scores in others:
        if scores.keys() != first.keys():
            unshared = sorted(scores.keys() ^ first.keys())
            raise UserError(
                f"{first_name} and {name} were scored by {metric} on different questions ("
                f"{len(unshared)} are in only one of them, such as {unshared[0]!r}); run both on "
                "the same questions, or add --shared to compare on those that all runs have."
            )
    return list(first)


def _shared_questions(values: Mapping[str, Mapping[str, float]], metric: str) -> list[str]:
    """The questions that every run has; UserError if there is none."""
    first, *others = values.values()
    shared = [q for q in first if all(q in scores for scores in others)]
    if not shared:
        raise UserError(
            f"--shared: no question was scored by {metric} in all of {', '.join(values)}; run "
            "them on the same questions."
        )
    return shared


def _pairs(names: Sequence[str], against_first: bool) -> list[tuple[str, str]]:
    if against_first:
        return [(name, names[0]) for name in names[1:]]
    return list(itertools.combinations(names, 2))


def format_p(value: float) -> str:
    """A p-value of `compare_runs` as pages and tables show it."""
    return f"{value:.2g}" if value > _LEAST_P else f"< {_LEAST_P:g}"
