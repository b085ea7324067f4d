"""`mmqa compare`: runs side by side, question by question, with tests of their differences."""

import json
import math
import re
from pathlib import Path

import pytest
from cli_runs import done, mmqa, rows_of, succeeded, write_rows
from report_pages import card_data, cards_of

from mmqa_jax.evaluation.significance import holm, mcnemar

pytestmark = pytest.mark.slow

ACC, F1 = "webqa_acc/no_lemma", "source_f1/official"


def write_run(folder: Path, by_scorer: dict[str, list[float]], **changes) -> Path:
    """What `mmqa run` leaves of a run with these scores of its questions q0, q1, ..."""
    (count,) = {len(values) for values in by_scorer.values()}
    folder.mkdir()
    record = {
        "dataset": "atlas", "row": folder.name, "split": "test", "limit": None, "n": count,
        "scores": {name: sum(values) / count for name, values in by_scorer.items()},
        "by_category": {},
    }  # fmt: skip
    (folder / "scores.json").write_text(json.dumps({**record, **changes}))
    rows = [
        {
            "question_id": f"q{i}",
            "answer": "",
            "sources": [],
            "seconds": 0.5,
            "scores": {name: values[i] for name, values in by_scorer.items()},
        }
        for i in range(count)
    ]
    write_rows(folder / "per_question.jsonl", rows)
    return folder


def changed_rows(run: Path, *rows: int, **fields) -> None:
    """Gives these rows of a run other fields."""
    path = run / "per_question.jsonl"
    lines = rows_of(path)
    for row in rows:
        lines[row] |= fields
    write_rows(path, lines)


def filters(page: Path) -> dict[str, int]:
    return {shown["label"]: shown["count"] for shown in card_data(page.read_text())["filters"]}


@pytest.fixture
def runs(tmp_path):
    """Three runs over 40 questions: b is right where a is and on 8 more; c misses one of a's."""
    a = [1.0] * 12 + [0.0] * 28
    b = [1.0] * 20 + [0.0] * 20
    c = [1.0] * 11 + [0.0] * 29
    graded = [[x / 2 + i / 128 for i, x in enumerate(values)] for values in (a, b, c)]
    return [
        write_run(tmp_path / name, {ACC: values, F1: more})
        for name, values, more in zip("abc", (a, b, c), graded, strict=True)
    ]


def test_holm_against_a_hand_computation():
    """Sorted .01 * 3, .03 * 2, .04 * 1; a later one is never below an earlier."""
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.5, 0.6]) == pytest.approx([1.0, 1.0])
    assert holm([0.04]) == [0.04]
    assert holm([]) == []


def test_mcnemar_against_a_hand_computation():
    """8 questions only the first gets, 2 only the second: 2 * P(Binomial(10, 1/2) <= 2)."""
    first = [1] * 8 + [0] * 2 + [1] * 5 + [0] * 5
    second = [0] * 8 + [1] * 2 + [1] * 5 + [0] * 5
    by_hand = 2 * (1 + 10 + 45) / 2**10
    assert mcnemar(first, second) == pytest.approx((by_hand, math.log10(by_hand)))
    assert mcnemar(second, first) == pytest.approx((by_hand, math.log10(by_hand)))
    assert mcnemar([1] * 6 + [0], [0] * 6 + [0])[0] == pytest.approx(2 / 2**6)
    assert mcnemar([1, 0, 1], [1, 0, 1]) == (1.0, 0.0)
    assert mcnemar([1, 0], [0, 1]) == (1.0, 0.0)


def test_a_p_value_that_underflows_is_no_zero(tmp_path):
    """5,000 questions that only the first run gets: p is 2 / 2**5000."""
    folders = [write_run(tmp_path / str(x), {ACC: [x] * 5000}) for x in (1.0, 0.0)]
    page = tmp_path / "page.html"
    compared = done("compare", *folders, f"--report={page}")
    (pair,) = compared["pairs"]
    assert (pair["p"], pair["p_holm"]) == (1e-300, 1e-300)
    assert pair["log10_p"] == pytest.approx(-4999 * math.log10(2))
    assert "p &lt; 1e-300 (McNemar)" in page.read_text()
    assert "| < 1e-300 | < 1e-300 | McNemar |" in mmqa("compare", *folders, "--markdown").out


def test_three_runs(runs):
    """All scores are 0 or 1: McNemar's p counts, corrected over the three pairs."""
    found = done("compare", *runs)
    assert found.keys() == {"metric", "against_first", "runs", "pairs"}
    assert found["metric"] == ACC  # the first that all have
    a, b, c = map(str, runs)
    assert [run.keys() for run in found["runs"]] == [{"name", "n", "score", "interval"}] * 3
    assert [(run["name"], run["n"]) for run in found["runs"]] == [(a, 40), (b, 40), (c, 40)]
    assert [run["score"] for run in found["runs"]] == pytest.approx([0.3, 0.5, 0.275])
    for run in found["runs"]:
        low, high = run["interval"]
        # The normal interval of a share of 40: a bootstrap's is near it.
        half = 1.96 * math.sqrt(run["score"] * (1 - run["score"]) / 40)
        assert (low, high) == pytest.approx((run["score"] - half, run["score"] + half), abs=0.03)
    pairs = found["pairs"]
    assert [(pair["a"], pair["b"]) for pair in pairs] == [(a, b), (a, c), (b, c)]
    assert [pair["difference"] for pair in pairs] == pytest.approx([-0.2, 0.025, 0.225])
    for pair in pairs:
        assert pair.keys() >= {"a", "b", "difference", "interval", "p", "p_holm"}
        assert pair["interval"][0] <= pair["difference"] <= pair["interval"][1]
    # 8 against 0, 1 against 0, 9 against 0.
    assert [pair["p"] for pair in pairs] == pytest.approx([2 / 2**8, 1.0, 2 / 2**9])
    assert [pair["p_holm"] for pair in pairs] == pytest.approx([4 / 2**8, 1.0, 6 / 2**9])
    assert {pair["test"] for pair in pairs} == {"McNemar"}
    assert pairs[0]["p_bootstrap"] < 0.05 < pairs[1]["p_bootstrap"]


def test_against_the_first_run_alone(runs):
    every = done("compare", *runs)["pairs"]
    found = done("compare", *runs, "--against_first")
    a, b, c = map(str, runs)
    pairs = found["pairs"]
    assert [(pair["a"], pair["b"]) for pair in pairs] == [(b, a), (c, a)]
    assert [pair["difference"] for pair in pairs] == pytest.approx([0.2, -0.025])
    assert [pair["p"] for pair in pairs] == pytest.approx([every[0]["p"], every[1]["p"]])
    assert [pair["p_holm"] for pair in pairs] == pytest.approx([4 / 2**8, 1.0])
    assert "over the pairs with the first run" in mmqa("compare", *runs, "--against_first").out


def test_pairs_of_several_data_sets(tmp_path, runs, refused):
    """p is that of each pair by itself, and corrected over both."""
    base, better, _ = runs
    webqa = [
        write_run(tmp_path / name, {ACC: [1.0] * right + [0.0] * (30 - right)}, dataset="webqa")
        for name, right in (("webqa_base", 5), ("webqa_better", 15))
    ]
    found = done("compare", base, better, *webqa, "--pairs")
    named = [(pair["a"], pair["b"]) for pair in found["pairs"]]
    assert named == [(str(better), str(base)), (str(webqa[1]), str(webqa[0]))]
    assert [pair["difference"] for pair in found["pairs"]] == pytest.approx([0.2, 1 / 3])
    assert [pair["p"] for pair in found["pairs"]] == pytest.approx([2 / 2**8, 2 / 2**10])
    assert [pair["p_holm"] for pair in found["pairs"]] == pytest.approx([2 / 2**8, 4 / 2**10])
    assert [run["n"] for run in found["runs"]] == [40, 40, 30, 30]
    out = mmqa("compare", base, better, *webqa, "--pairs").out
    assert "Holm-corrected over these pairs" in out
    again = done("compare", base, better, better, runs[2], "--pairs")
    assert len(again["runs"]) == 3, "a run in two pairs is summarized once"
    refused("compare", *runs, "--pairs", message="3 workdirs are no pairs")
    refused("compare", base, webqa[0], "--pairs", message="different values of dataset")
    refused("compare", *webqa, "--pairs", "--against_first", message="takes neither --report")
    other = [write_run(tmp_path / name, {F1: [1.0, 0.0]}) for name in ("other", "another")]
    refused("compare", base, better, *other, "--pairs", message="scored by")


def test_shared_questions(tmp_path, runs, refused):
    few = write_run(tmp_path / "few", {ACC: [1.0] * 4 + [0.0] * 12}, limit=16)
    refused("compare", runs[0], few, message="different values of limit")
    found = done("compare", runs[0], few, "--shared")
    assert [(run["n"], run["score"]) for run in found["runs"]] == [(16, 0.75), (16, 0.25)]
    (pair,) = found["pairs"]
    assert (pair["difference"], pair["p"]) == pytest.approx((0.5, 2 / 2**8))
    rows = [{"question_id": f"other{i}", "scores": {ACC: 1.0}} for i in range(16)]
    write_rows(few / "per_question.jsonl", rows)
    refused("compare", runs[0], few, "--shared", message=rf"no question was scored by {ACC} in all")


def test_calls_and_tokens_of_a_language_model(tmp_path, runs):
    used = {"calls_per_question": 6.98, "prompt_tokens_per_question": 1849.2, "calls": 279}
    used["completion_tokens_per_question"] = 41.6
    asked = write_run(tmp_path / "asked", {ACC: [1.0] * 16 + [0.0] * 24}, llm=used)
    command = ["compare", asked, runs[0]]
    first, second = done(*command)["runs"]
    assert (first["calls_per_question"], first["prompt_tokens_per_question"]) == (6.98, 1849.2)
    assert second.keys() == {"name", "n", "score", "interval"}
    table = mmqa(*command, "--markdown").out
    assert "| LLM calls a question | prompt tokens a question | new tokens a question |" in table
    assert "| 6.980 | 1,849 | 42 |" in table
    assert "LLM calls" not in mmqa("compare", *runs[:2], "--markdown").out


def test_scores_that_are_not_0_or_1_are_compared_by_the_bootstrap(runs):
    found = done("compare", *runs[:2], f"--metric={F1}")
    assert found["metric"] == F1
    (pair,) = found["pairs"]
    assert pair["test"] == "bootstrap"
    assert pair["difference"] == pytest.approx(-0.1)
    # The differences are those of ACC halved, and so is their interval.
    (binary,) = done("compare", *runs[:2], f"--metric={ACC}")["pairs"]
    assert pair["interval"] == pytest.approx([x / 2 for x in binary["interval"]])
    assert pair["p"] == pytest.approx(binary["p_bootstrap"])
    assert pair["p"] != pytest.approx(binary["p"])
    assert pair["p_holm"] == pair["p"]  # of one comparison


def test_pairs_are_by_question_not_by_line(runs):
    before = done("compare", *runs[:2])
    path = runs[1] / "per_question.jsonl"
    path.write_text("".join(reversed(path.read_text().splitlines(keepends=True))))
    assert done("compare", *runs[:2]) == before


def test_the_tables(runs):
    ended = succeeded("compare", *runs, "--markdown")
    a, b, _ = map(str, runs)
    assert re.search(rf"\| {re.escape(a)} \| 40 \| 0\.300 ", ended.out), ended.out
    (pair,) = (line for line in ended.out.splitlines() if f"{a} - {b}" in line)
    assert "-0.200" in pair
    assert [cell.strip() for cell in pair.split("|")[-4:-1]] == ["0.0078", "0.016", "McNemar"]
    assert "Holm" in ended.out


def test_only_questions_that_a_scorer_applies_to_are_compared(runs):
    for run in runs[:2]:
        changed_rows(run, *range(4), scores={ACC: 1.0})
    found = done("compare", *runs[:2], f"--metric={F1}")
    assert [run["n"] for run in found["runs"]] == [36, 36]
    assert done("compare", *runs[:2])["runs"][0]["n"] == 40


def test_one_run_or_the_same_twice(runs, refused):
    refused("compare", runs[0], message=r"at least two workdirs were expected")
    refused("compare", runs[0], runs[1], runs[0], message=r"a workdir is named twice")
    refused("compare", runs[0], f"{runs[0]}/", message=r"a workdir is named twice")
    refused("compare", runs[0], runs[0] / "..", message=r"holds no finished run")
    refused("compare", runs[0], runs[1] / ".." / "a", message=r"a workdir is named twice")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"split": "val"}, r"have different values of split \('test', 'val'\)"),
        ({"limit": 40}, r"have different values of limit \(None, 40\)"),
        ({"dataset": "webqa"}, r"have different values of dataset \('atlas', 'webqa'\)"),
    ],
)
def test_runs_of_another_split_limit_or_benchmark(changes, message, runs, refused, tmp_path):
    other = write_run(tmp_path / "other", {ACC: [1.0] * 40}, **changes)
    refused("compare", runs[0], other, message=rf"a and .*other {message}; compare runs over the")


def test_runs_over_other_questions(runs, refused, tmp_path):
    fewer = write_run(tmp_path / "fewer", {ACC: [1.0] * 39})
    message = rf"a and .*fewer were scored by {ACC} on different questions \(1 are .*q39"
    refused("compare", runs[0], fewer, message=message)
    changed_rows(runs[1], 7, question_id="x7")
    refused("compare", *runs[:2], message=r"different questions \(2 are .*such as 'q7'")


def test_a_metric_that_one_lacks(runs, refused, tmp_path):
    only_f1 = write_run(tmp_path / "ranked", {F1: [0.5] * 40})
    message = rf"--metric={ACC}: .*ranked was not scored by it; use one of {F1}\.$"
    refused("compare", runs[0], only_f1, f"--metric={ACC}", message=message)
    refused("compare", *runs, "--metric=bleu", message=rf"--metric=bleu: .*use one of {ACC}, {F1}")
    # Without --metric it is the first that they share.
    assert done("compare", runs[0], only_f1)["metric"] == F1
    other = write_run(tmp_path / "other", {"recall@1": [1.0] * 40})
    refused("compare", only_f1, other, message=r"the runs have no scorer in common \(.*recall@1\)")
    message = r"none: the runs have no scorer in common"
    refused("compare", only_f1, other, f"--metric={F1}", message=message)


def test_runs_over_a_split_whose_gold_is_hidden(runs, refused, tmp_path):
    hidden = [write_run(tmp_path / name, {ACC: [1.0]}, scores={}) for name in ("x", "y")]
    message = r"x: holds no scores, since the gold answers of its split \(test\) are hidden; comp"
    for compared in (hidden, [*hidden, f"--metric={ACC}"], [runs[0], hidden[0]]):
        refused("compare", *compared, message=message)


@pytest.mark.parametrize("name", ["scores.json", "per_question.jsonl"])
def test_a_run_that_did_not_end(name, runs, refused):
    (runs[1] / name).unlink()
    refused("compare", *runs, message=rf"b: holds no finished run \(no {name}\); run `mmqa run")
    refused("compare", runs[0], "nowhere", message=r"nowhere: holds no finished run")


@pytest.mark.parametrize("text", ["[]", "{}", '{"scores": 3}', "{oops"])
def test_scores_of_another_shape(text, runs, refused):
    (runs[1] / "scores.json").write_text(text)
    refused("compare", *runs, message=r"b/scores\.json(: was not written by `mmqa run`|, line 1)")


@pytest.mark.parametrize("line", ["[1]", '{"question_id": "q3"}', "{oops", '{"scores": {}}'])
def test_lines_of_another_shape(line, runs, refused):
    path = runs[1] / "per_question.jsonl"
    lines = path.read_text().splitlines()
    lines[3] = line
    path.write_text("\n".join(lines) + "\n")
    refused("compare", *runs, message=r"b/per_question\.jsonl, line 4")


def test_the_page_of_two_runs(runs, tmp_path):
    """Side by side, those first on which they differ; without their data ids stand for texts."""
    changed_rows(runs[1], 15, answer="<b>Nairobi</b>", sources=["s1"])
    page = tmp_path / "compare.html"
    found = done("compare", *runs[:2], f"--report={page}")
    assert found["report"] == str(page)
    text = page.read_text()
    assert filters(page) == {
        "all": 40, "A right, B wrong": 0, "B right, A wrong": 8, "both right": 12, "both wrong": 20,
    }  # fmt: skip
    cards = cards_of(text)
    assert [card["id"] for card in cards[:8]] == [f"q{n}" for n in range(12, 20)]
    (card,) = (card for card in cards if card["id"] == "q15")
    assert [(one["system"], one["answer"], one["verdict"]) for one in card["answers"]] == [
        ("A", "", "wrong"), ("B", "<b>Nairobi</b>", "right"),
    ]  # fmt: skip
    assert [(one["id"], one["cited"]) for one in card["sources"]] == [("s1", [1])]
    assert "A − B: -0.200" in text
    assert "p = 0.0078 (McNemar)" in text
    assert "questions and sources are shown by their ids" in text


def test_the_page_of_graded_and_of_three_runs(runs, tmp_path):
    page = tmp_path / "compare.html"
    done("compare", *runs[:2], f"--metric={F1}", f"--report={page}")
    assert list(filters(page))[-2:] == ["A better", "B better"]
    done("compare", *runs, f"--report={page}")
    apart = [f"{run} right, others wrong" for run in "ABC"]
    assert list(filters(page)) == ["all", *apart, "all right", "all wrong"]


def test_pages_that_cannot_be_made(runs, refused, tmp_path):
    page = f"--report={tmp_path / 'compare.html'}"
    many = [*runs, *(tmp_path / f"nowhere{number}" for number in range(24))]
    message = "--report: at most 26 runs were expected; name fewer"
    refused("compare", *many, page, message=message)
    changed_rows(runs[1], 3, sources="s1")
    message = r"b/per_question\.jsonl, line 4: expected a text \"answer\""
    refused("compare", *runs[:2], page, message=message)
    refused("compare", *runs[:2], f"--report={tmp_path}", message="is a folder, a file to write")
