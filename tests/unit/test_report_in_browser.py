"""Reports in a real browser, one of 5,000 questions: filters, search, tables, charts, and what is blocked.

One browser shows all reports, each in a frame of a page that collects what scripts in them find.
"""

import base64
import hashlib
import html
import json
import re
import shutil
import subprocess
from typing import Any, NamedTuple

import pytest

from mmqa_jax.data.schema import Question
from mmqa_jax.evaluation.report import (
    Card,
    CardAnswer,
    CardFilter,
    CardSource,
    ReportData,
    brief_card,
    render_report,
)
from mmqa_jax.evaluation.tables import Table
from tests.pictures import plain

BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), ""
)
pytestmark = pytest.mark.skipif(not BROWSER, reason="needs Chromium or Chrome")
COLLECTS = """<title></title><script>const seen = {}; onmessage = (event) => {
  Object.assign(seen, event.data);
  document.title = JSON.stringify(seen);
};</script>"""


class Looked(NamedTuple):
    """A report, and the body of a script that tells what it finds in it.

    Attributes:
      width: of its frame in pixels.
    """

    data: ReportData
    script: str
    width: int = 1280


def large() -> Looked:
    """5,000 questions, 1,000 of them in brief: what each filter shows, and how many questions are elements of the page."""
    cards = [
        Card(
            f"question {n} ?",
            [CardAnswer("", "blue", float(n % 3) / 2)],
            f"cat{n % 10}",
            [("reference", "red")],
            details=[("prompt", f"Context: picture {n}.\n" + "Q: which color ?\nA: red\n\n" * 8)],
        )
        for n in range(4000)
    ]
    asked = [
        Question(f"q{n}", "", f"question {n} ?", category=f"cat{n % 10}") for n in range(4000, 5000)
    ]
    cards += [
        brief_card(question, [CardAnswer("", "blue", float(n % 3) / 2)], [("reference", "red")])
        for n, question in enumerate(asked, 4000)
    ]
    script = """
      const count = () => document.getElementById("card-count").textContent;
      const category = document.getElementById("card-category");
      const found = [count()];
      document.querySelector('[data-filter="wrong"]').click();
      found.push(count());
      category.value = "cat3";
      category.dispatchEvent(new Event("change"));
      found.push(count(), document.querySelectorAll("details").length);
      const search = document.getElementById("card-search");
      search.value = "question 4983 ?";
      search.dispatchEvent(new Event("input"));
      setTimeout(() => tell([...found, count(), document.querySelector("article h3").textContent]), 400);
    """
    return Looked(ReportData("large", cards=cards), script)


def full() -> Looked:
    """Something of everything."""
    source = CardSource("s", "a dot", picture=plain((200, 0, 0), (9, 9)), rank=1, cited=[0])
    answer = CardAnswer("full", "red", 1.0, {"webqa_acc": 1.0})
    data = ReportData(
        "full",
        facts={"device": "cpu"},
        tables=[Table("Scores", ("split", "F1"), [["all", 0.5]])],
        curves={"qa": {"loss": [(1, 2.0), (2, 1.0)]}},
        recall={"clip": {1: 0.2, 10: 0.5}},
        stages=[("train", 60.0)],
        cards=[
            Card(
                "Which color ?",
                [answer],
                "color",
                sources=[source],
                picture=plain((200, 0, 0), (9, 9)),
            )
        ],
    )
    return Looked(data, 'tell(document.getElementById("card-count").textContent);')


EVIL = "<img src=x onerror=alert(1)>"


def searched() -> Looked:
    """Two questions, of which a source's word finds one."""
    cards = [
        Card("Which flag ?", [CardAnswer("", EVIL, 1.0)]),
        Card(
            "Which river ?", [CardAnswer("", "Nile", 0.0)], sources=[CardSource("s", "An OASIS.")]
        ),
    ]
    script = """
      const search = document.getElementById("card-search");
      const texts = () => [...document.querySelectorAll("article h3")].map((h) => h.textContent);
      const answer = document.querySelector("article .answer").textContent;
      search.value = "oasis";
      search.dispatchEvent(new Event("input"));
      setTimeout(() => tell([answer, ...texts()]), 400);
    """
    return Looked(ReportData("two", cards=cards), script)


def side_by_side() -> Looked:
    """Two runs, and the questions of each of three filters."""
    scores = [(1.0, 0.0), (0.0, 1.0), (1.0, 1.0), (0.5, 0.25)]
    cards = [
        Card(f"{a} {b}", [CardAnswer("A", "x", a), CardAnswer("B", "y", b)]) for a, b in scores
    ]
    filters = [
        CardFilter("all", [[], []]),
        CardFilter("A right, B wrong", [["right"], ["partly", "wrong"]]),
        CardFilter("A better", [[], []], 1),
    ]
    script = """
      const found = [];
      for (const button of document.querySelectorAll("#card-verdicts button")) {
        button.click();
        const shown = [...document.querySelectorAll("article h3")].map((one) => one.textContent);
        found.push(button.textContent + ": " + shown.join(", "));
      }
      tell(found);
    """
    return Looked(ReportData("A, B", cards=cards, filters=filters), script)


def sorted_tables() -> Looked:
    """A table sorted by each column, and a chart read by the keyboard."""
    rows = [["b", 0.5, 10], ["a", None, 9], ["c", 0.75, 1_000], ["all", 0.6, 1_019]]
    data = ReportData(
        "t",
        tables=[Table("T", ("name", "mrr", "n"), rows)],
        curves={"qa": {"loss": [(1, 2.0), (2, 1.25)]}},
    )
    script = """
      const names = () => [...document.querySelectorAll("tbody tr")].map((r) => r.cells[0].textContent);
      const [name, score, n] = document.querySelectorAll("th button");
      const found = [];
      for (const button of [name, score, n, n]) { button.click(); found.push(names().join("")); }
      found.push(n.parentElement.getAttribute("aria-sort"), score.textContent);
      const chart = document.querySelector("svg.chart");
      chart.dispatchEvent(new KeyboardEvent("keydown", { key: "ArrowRight" }));
      chart.dispatchEvent(new KeyboardEvent("keydown", { key: "ArrowRight" }));
      found.push([...document.getElementById("tip").children].map((one) => one.textContent).join("; "));
      tell(found);
    """
    return Looked(data, script)


def phone() -> Looked:
    """Everything is long, and the frame as wide as a phone."""
    columns = [f"a long heading of column {n}" for n in range(12)]
    long = "w" * 300
    source = CardSource(long, long, long, rank=1, score=0.5, cited=[0], gold=True)
    data = ReportData(
        long,
        description=long,
        headline={long: 0.5},
        cards=[Card(long, [CardAnswer(long, long, 1.0)] * 4, long, [(long, long)], [source])],
        tables=[Table(long, columns, [[0.5] * 12], long)],
        recall={long: {1: 0.2, 10: 0.5}},
        curves={long: {long: [(1, 2.0), (2, 1.0)]}},
        stages=[("train", 60.0)],
        facts={long: long},
    )
    return Looked(data, "tell(document.documentElement.scrollWidth);", 390)


REPORTS = (large, full, searched, side_by_side, sorted_tables, phone)


class Browsed(NamedTuple):
    """What the scripts told, by report, and how often the browser blocked something."""

    found: dict[str, Any]
    blocked: int


def browse(page, folder):
    """The page as its scripts leave it, and how often its content security policy blocked something."""
    ended = subprocess.run(
        [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr",
         f"--user-data-dir={folder}/user", "--window-size=1280,900",
         "--virtual-time-budget=10000", "--dump-dom", page.as_uri()],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    # Chromium says it of frames and scripts in one way, of loads in another.
    return ended.stdout, len(re.findall(r"CONSOLE.*Content Security Policy", ended.stderr))


def with_script(data: ReportData, script: str) -> str:
    """The report with a script that its policy allows by its hash, as it does its own."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    page = render_report(data).replace("script-src ", f"script-src 'sha256-{digest}' ")
    return page.replace("</body>", f"<script>{script}</script></body>")


@pytest.fixture(scope="module")
def browsed(tmp_path_factory) -> Browsed:
    folder = tmp_path_factory.mktemp("browser")
    frames = [COLLECTS]
    for make in REPORTS:
        report, name = make(), make.__name__
        tell = f"const tell = (found) => parent.postMessage({{{name}: found}}, '*');"
        script = f'window.addEventListener("load", () => {{ {tell} {report.script} }});'
        file = folder / f"{name}.html"
        file.write_text(with_script(report.data, script))
        size = f'width="{report.width}" height="800" style="border:0"'
        frames.append(f'<iframe {size} src="{file.as_uri()}"></iframe>')
    page = folder / "all.html"
    page.write_text("".join(frames))
    dom, blocked = browse(page, folder)
    title = re.search(r"<title>(.*?)</title>", dom, re.S)[1]
    return Browsed(json.loads(html.unescape(title)), blocked)


def test_filters_of_5000_questions(browsed):
    everything, wrong, in_category, details, *found = browsed.found["large"]
    assert everything == "5 of 5000 shown"
    assert wrong == f"5 of {sum(n % 3 == 0 for n in range(5000))} shown"
    assert in_category == f"5 of {sum(n % 3 == 0 and n % 10 == 3 for n in range(5000))} shown"
    assert details < 100  # only the questions of a page are elements
    assert found == ["1 of 1 shown", "question 4983 ?"]


def test_the_policy_blocks_all_that_is_not_the_pages_own(browsed, tmp_path):
    """Of these reports nothing is blocked; of one with a foreign script, picture and frame, all."""
    assert browsed.blocked == 0
    assert browsed.found["full"] == "1 of 1 shown"  # the page's own script ran
    hostile = (
        '<script>document.title = "taken"</script><img src="http://127.0.0.1:9/a.png">'
        '<img src=x onerror="document.title = 1"><iframe src="http://127.0.0.1:9/"></iframe>'
    )
    page = tmp_path / "page.html"
    page.write_text(render_report(full().data).replace("</main>", f"{hostile}</main>"))
    dom, blocked = browse(page, tmp_path)
    assert blocked >= 4
    assert "<title>full</title>" in dom


def test_search_reads_questions_answers_and_sources(browsed):
    assert browsed.found["searched"] == [EVIL, "Which river ?"]


def test_runs_side_by_side_are_filtered_by_who_is_right(browsed):
    assert browsed.found["side_by_side"] == [
        "all 4: 1.0 0.0, 0.0 1.0, 1.0 1.0, 0.5 0.25",
        "A right, B wrong 1: 1.0 0.0",
        "A better 2: 1.0 0.0, 0.5 0.25",
    ]


def test_tables_are_sorted_and_charts_tell_their_values(browsed):
    assert browsed.found["sorted_tables"] == [
        *("abcall", "cbaall", "cbaall", "abcall", "ascending", "mean reciprocal rank"),
        "step 2; loss: 1.25",
    ]


def test_on_a_phone_the_page_does_not_scroll_sideways(browsed):
    """Chromium's window is 500 px wide at least: a frame of 390 px holds the page."""
    assert browsed.found["phone"] <= 390
