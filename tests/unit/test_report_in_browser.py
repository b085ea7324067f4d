"""A report of 5,000 questions in a real browser: its filters find what they should, page by page."""

from __future__ import annotations

import re
import shutil
import subprocess

import pytest

from mmqa_jax.evaluation.report import ReportData, Trace, render_report

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
