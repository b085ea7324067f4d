"""A report of 5,000 questions in a real browser: its filters find what they should, page by page."""

from __future__ import annotations

import base64
import hashlib
import html
import io
import re
import shutil
import subprocess

import pytest
from PIL import Image

from mmqa_jax.evaluation.cards import Card, CardAnswer, CardFilter, CardSource
from mmqa_jax.evaluation.report import ReportData, render_report
from mmqa_jax.evaluation.tables import Table

BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), ""
)
# Runs in the page: what each filter shows, and how many questions are elements of the page.
SCRIPT = """<script>window.addEventListener("load", () => {
  const count = () => document.getElementById("card-count").textContent;
  const category = document.getElementById("card-category");
  const seen = [count()];
  document.querySelector('[data-filter="wrong"]').click();
  seen.push(count());
  category.value = "cat3";
  category.dispatchEvent(new Event("change"));
  seen.push(count());
  seen.push(`${document.querySelectorAll("details").length} details`);
  document.title = seen.join(" | ");
});</script></body>"""


def hash_of(element):
    """The content security policy's name of a script."""
    text = re.search(r"<script>(.*)</script>", element, re.S)[1]
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def after(data, script, tmp_path, width=1280):
    """What a script leaves as the page's title, split at " | "."""
    page = render_report(data).replace("script-src ", f"script-src {hash_of(script)} ")
    file = tmp_path / "report.html"
    file.write_text(page.replace("</body>", script))
    ended = subprocess.run(
        [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}/user",
         f"--window-size={width},900", "--virtual-time-budget=10000", "--dump-dom", file.as_uri()],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    return re.search(r"<title>(.*?)</title>", ended.stdout, re.S)[1].split(" | ")


def in_page(body):
    """A script element that runs when the page is there, and joins what it finds as the title."""
    return (
        '<script>window.addEventListener("load", () => { const seen = [];'
        f'{body} document.title = seen.join(" | "); }});</script></body>'
    )


@pytest.mark.skipif(not BROWSER, reason="needs Chromium or Chrome")
def test_filters_of_5000_questions(tmp_path):
    cards = [
        Card(
            f"question {n} ?",
            [CardAnswer("", "blue", float(n % 3) / 2)],
            f"cat{n % 10}",
            [("reference", "red")],
            details=[("prompt", f"Context: picture {n}.\n" + "Q: which color ?\nA: red\n\n" * 8)],
        )
        for n in range(5000)
    ]
    everything, wrong, in_category, details = after(
        ReportData("large", cards=cards), SCRIPT, tmp_path
    )
    assert everything == "5 of 5000 shown"
    assert wrong == f"5 of {sum(n % 3 == 0 for n in range(5000))} shown"
    assert in_category == f"5 of {sum(n % 3 == 0 and n % 10 == 3 for n in range(5000))} shown"
    assert int(details.split()[0]) < 100  # only the questions of a page are elements


@pytest.mark.skipif(not BROWSER, reason="needs Chromium or Chrome")
def test_the_policy_blocks_all_that_is_not_the_pages_own(tmp_path):
    """Of a full page nothing is blocked; of one with a foreign script, picture and frame, all."""
    picture = io.BytesIO()
    Image.new("RGB", (9, 9), (200, 0, 0)).save(picture, "PNG")
    source = CardSource("s", "a dot", picture=picture.getvalue(), rank=1, cited=[0])
    answer = CardAnswer("full", "red", 1.0, {"webqa_acc": 1.0})
    data = ReportData(
        "full",
        facts={"device": "cpu"},
        tables=[Table("Scores", ("split", "F1"), [["all", 0.5]])],
        curves={"qa": {"loss": [(1, 2.0), (2, 1.0)]}},
        recall={"clip": {1: 0.2, 10: 0.5}},
        stages=[("train", 60.0)],
        cards=[
            Card("Which color ?", [answer], "color", sources=[source], picture=picture.getvalue())
        ],
    )
    page = render_report(data)

    def blocked(text):
        file = tmp_path / "page.html"
        file.write_text(text)
        ended = subprocess.run(
            [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr",
             f"--user-data-dir={tmp_path}/user", "--virtual-time-budget=5000", "--dump-dom",
             file.as_uri()],
            capture_output=True, text=True, timeout=120, check=True,
        )  # fmt: skip
        # Chromium says it of frames and scripts in one way, of loads in another.
        said = re.findall(r"CONSOLE.*Content Security Policy", ended.stderr)
        return len(said), ended.stdout

    none, dom = blocked(page)
    assert none == 0
    assert "1 of 1 shown" in dom  # the page's own script ran
    hostile = (
        '<script>document.title = "taken"</script><img src="http://127.0.0.1:9/a.png">'
        '<img src=x onerror="document.title = 1"><iframe src="http://127.0.0.1:9/"></iframe>'
    )
    some, dom = blocked(page.replace("</main>", f"{hostile}</main>"))
    assert some >= 4
    assert "<title>full</title>" in dom


@pytest.mark.skipif(not BROWSER, reason="needs Chromium or Chrome")
def test_search_reads_questions_answers_and_sources(tmp_path):
    evil = "<img src=x onerror=alert(1)>"
    cards = [
        Card("Which flag ?", [CardAnswer("", evil, 1.0)]),
        Card(
            "Which river ?", [CardAnswer("", "Nile", 0.0)], sources=[CardSource("s", "An OASIS.")]
        ),
    ]
    script = in_page("""
      const search = document.getElementById("card-search");
      const texts = () => [...document.querySelectorAll("article h3")].map((h) => h.textContent);
      seen.push(document.querySelector("article .answer").textContent);
      search.value = "oasis";
      search.dispatchEvent(new Event("input"));
      setTimeout(() => { document.title = seen.concat(texts()).join(" | "); }, 400);
    """)
    assert after(ReportData("two", cards=cards), script, tmp_path) == [
        html.escape(evil, quote=False),
        "Which river ?",
    ]


@pytest.mark.skipif(not BROWSER, reason="needs Chromium or Chrome")
def test_runs_side_by_side_are_filtered_by_who_is_right(tmp_path):
    scores = [(1.0, 0.0), (0.0, 1.0), (1.0, 1.0), (0.5, 0.25)]
    cards = [
        Card(f"{a} {b}", [CardAnswer("A", "x", a), CardAnswer("B", "y", b)]) for a, b in scores
    ]
    filters = [
        CardFilter("all", [[], []]),
        CardFilter("A right, B wrong", [["right"], ["partly", "wrong"]]),
        CardFilter("A better", [[], []], 1),
    ]
    script = in_page("""
      for (const button of document.querySelectorAll("#card-verdicts button")) {
        button.click();
        const shown = [...document.querySelectorAll("article h3")].map((one) => one.textContent);
        seen.push(button.textContent + ": " + shown.join(", "));
      }
    """)
    assert after(ReportData("A, B", cards=cards, filters=filters), script, tmp_path) == [
        "all 4: 1.0 0.0, 0.0 1.0, 1.0 1.0, 0.5 0.25",
        "A right, B wrong 1: 1.0 0.0",
        "A better 2: 1.0 0.0, 0.5 0.25",
    ]


@pytest.mark.skipif(not BROWSER, reason="needs Chromium or Chrome")
def test_tables_are_sorted_and_charts_tell_their_values(tmp_path):
    rows = [["b", 0.5, 10], ["a", None, 9], ["c", 0.75, 1_000], ["all", 0.6, 1_019]]
    data = ReportData(
        "t",
        tables=[Table("T", ("name", "mrr", "n"), rows)],
        curves={"qa": {"loss": [(1, 2.0), (2, 1.25)]}},
    )
    script = in_page("""
      const names = () => [...document.querySelectorAll("tbody tr")].map((r) => r.cells[0].textContent);
      const [name, score, n] = document.querySelectorAll("th button");
      for (const button of [name, score, n, n]) { button.click(); seen.push(names().join("")); }
      seen.push(n.parentElement.getAttribute("aria-sort"), score.textContent);
      const chart = document.querySelector("svg.chart");
      chart.dispatchEvent(new KeyboardEvent("keydown", { key: "ArrowRight" }));
      chart.dispatchEvent(new KeyboardEvent("keydown", { key: "ArrowRight" }));
      seen.push([...document.getElementById("tip").children].map((one) => one.textContent).join("; "));
    """)
    assert after(data, script, tmp_path) == [
        *("abcall", "cbaall", "cbaall", "abcall", "ascending", "mean reciprocal rank"),
        "step 2; loss: 1.25",
    ]


@pytest.mark.skipif(not BROWSER, reason="needs Chromium or Chrome")
def test_on_a_phone_the_page_does_not_scroll_sideways(tmp_path):
    """Chromium's window is 500 px wide at least: a frame of 390 px holds the page."""
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
    page = tmp_path / "phone.html"
    measure = in_page("parent.postMessage(document.documentElement.scrollWidth, '*');")
    text = render_report(data).replace("script-src ", f"script-src {hash_of(measure)} ")
    page.write_text(text.replace("</body>", measure))
    frame = tmp_path / "frame.html"
    frame.write_text(
        "<title></title><script>onmessage = (e) => { document.title = e.data; };</script>"
        f'<iframe width="390" height="800" style="border:0" src="{page.as_uri()}"></iframe>'
    )
    ended = subprocess.run(
        [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}/user",
         "--virtual-time-budget=5000", "--dump-dom", frame.as_uri()],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    assert int(re.search(r"<title>(.*?)</title>", ended.stdout)[1]) <= 390
