"""A report of 5,000 questions in a real browser: its filters find what they should, page by page."""

from __future__ import annotations

import base64
import hashlib
import io
import re
import shutil
import subprocess

import pytest
from PIL import Image

from mmqa_jax.evaluation.report import (
    Example,
    ExampleAnswer,
    ExampleSource,
    ReportData,
    Trace,
    render_report,
)
from mmqa_jax.evaluation.tables import Table

BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), ""
)
# Runs in the page: what each filter shows, and how many questions are elements of the page.
SCRIPT = """<script>window.addEventListener("load", () => {
  const count = () => document.getElementById("trace-count").textContent;
  const category = document.getElementById("trace-category");
  const seen = [count()];
  document.querySelector('[data-right="wrong"]').click();
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


@pytest.mark.skipif(not BROWSER, reason="needs Chromium or Chrome")
def test_filters_of_5000_questions(tmp_path):
    traces = [
        Trace(
            f"question {n} ?",
            f"cat{n % 10}",
            float(n % 3) / 2,
            [("reference", "red"), ("answer", "blue")],
            [("prompt", f"Context: picture {n}.\n" + "Q: which color ?\nA: red\n\n" * 8)],
        )
        for n in range(5000)
    ]
    page = render_report(ReportData("large", traces=traces, trace_scorer="vqa_accuracy/paper"))
    page = page.replace("script-src ", f"script-src {hash_of(SCRIPT)} ")
    file = tmp_path / "report.html"
    file.write_text(page.replace("</body>", SCRIPT))
    ended = subprocess.run(
        [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}/user",
         "--virtual-time-budget=10000", "--dump-dom", file.as_uri()],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    title = re.search(r"<title>(.*?)</title>", ended.stdout, re.S)[1]
    everything, wrong, in_category, details = title.split(" | ")
    assert everything == "25 of 5000 shown"
    assert wrong == f"25 of {sum(n % 3 == 0 for n in range(5000))} shown"
    assert in_category == f"25 of {sum(n % 3 == 0 and n % 10 == 3 for n in range(5000))} shown"
    assert int(details.split()[0]) < 100  # only the questions of a page are elements


@pytest.mark.skipif(not BROWSER, reason="needs Chromium or Chrome")
def test_the_policy_blocks_all_that_is_not_the_pages_own(tmp_path):
    """Of a full page nothing is blocked; of one with a foreign script, picture and frame, all."""
    picture = io.BytesIO()
    Image.new("RGB", (9, 9), (200, 0, 0)).save(picture, "PNG")
    source = ExampleSource("s", "a dot", picture=picture.getvalue(), rank=1, cited=True)
    answer = ExampleAnswer("full", "red", {"webqa_acc": 1.0})
    data = ReportData(
        "full",
        facts={"device": "cpu"},
        tables=[Table("Scores", ("split", "F1"), [["all", 0.5]])],
        curves={"qa": {"loss": [(1, 2.0), (2, 1.0)]}},
        recall={"clip": {1: 0.2, 10: 0.5}},
        stages=[("train", 60.0)],
        examples=[Example("Which color ?", "color", [answer], ["red"], sources=[source])],
        traces=[Trace("Which ?", "c", 1.0, [("answer", "red")], picture=picture.getvalue())],
        trace_scorer="vqa_accuracy/paper",
    )
    page = render_report(data)

    def blocked(html):
        file = tmp_path / "page.html"
        file.write_text(html)
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
