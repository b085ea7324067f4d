"""The HTML report: parsed, escaped, complete, and whole when data is missing."""

import base64
import html.parser
import io
import json
import re

import numpy as np
import PIL.Image
import pytest
from report_pages import card_data, cards_of

from mmqa_jax.data.schema import Material
from mmqa_jax.evaluation import report, tables
from mmqa_jax.evaluation.scores import Scores
from mmqa_jax.evaluation.significance import Interval
from tests.pictures import encoded
from tests.refusals import refuses

VOID = {"meta", "br", "img", "link", "hr", "input"}
EVIL = "Is <script>alert('x')</script> & \"this\" a flag?"


class Page(html.parser.HTMLParser):
    """Checks that tags nest; keeps elements and the text outside script and style."""

    def __init__(self, text):
        super().__init__()
        self.open, self.elements, self.words = [], [], []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if not {"script", "style"} & set(self.open):
            self.words.append(data)

    @property
    def text(self):
        return " ".join(" ".join(self.words).split())

    def all(self, tag, **wanted):
        return [
            attrs
            for name, attrs in self.elements
            if name == tag and all(attrs.get(key) == value for key, value in wanted.items())
        ]

    def with_class(self, name):
        return [attrs for _, attrs in self.elements if name in (attrs.get("class") or "").split()]


def picture(color, size=(640, 480), kind="PNG"):
    return encoded(PIL.Image.new("RGB", size, color), kind)


def scores(values, categories):
    return Scores(
        tuple(map(str, range(len(values)))),
        tuple(categories),
        {"webqa_acc/no_lemma": np.array(values, dtype=float)},
    )


def full_report():
    categories = ["color"] * 3 + ["text"] * 2
    oracle = scores([1, 1, 0.5, 1, 0], categories)
    return report.ReportData(
        title="Atlas <1>",
        description="What it is.",
        notice="Numbers are not WebQA's.",
        materials=[Material("Pictures: OpenMoji", "https://openmoji.org", "CC BY-SA 4.0")],
        facts={"device": "cpu"},
        headline={"accuracy": 0.7},
        tables=[
            tables.answer_table("Setting: oracle", oracle),
            tables.Table(
                "Retrieval",
                ("row", "recall@1", "F1"),
                [["bm25", 0.25, None], ["reranked", None, 0.75]],
            ),
        ],
        curves={
            "rerank": {"loss": [(i, 1 / (1 + i)) for i in range(200)], "dev_f1": [(100, 0.4)]},
            "answer": {"loss": [(0, 3.0), (10, 1.0)]},
            "empty": {"loss": []},
        },
        recall={"bm25": {1: 0.25, 20: 0.5}, "dense": {1: 0.5, 20: 1.0}, "a$b$_<c>": {1: 0, 20: 1}},
        stages=[("prepare", 5.04), ("train", 125.0)],
        cards=[
            report.Card(
                EVIL,
                [report.CardAnswer("full", "Yes.", 0.25, {"webqa_acc/no_lemma": 0.25})],
                "YesNo",
                [("reference", "No <b>.")],
                [
                    report.CardSource(
                        "s1", "Flag of A", "A", picture("blue"), False, 1, 0.9, [0], True
                    ),
                    report.CardSource("s2", "A snippet", "B", None, False, 2, 0.5),
                    report.CardSource("s3", "Flag of C", "C", b"not a picture", gold=True),
                ],
                picture("red", kind="JPEG"),
            ),
            report.Card("Which color?", [report.CardAnswer("full", "")], "color"),
        ],
        bars={
            "webqa_acc/no_lemma": [report.Bar("<a>", Interval(0.5, 0.4, 0.6), "./a/report.html")]
        },
    )


@pytest.fixture(scope="module")
def page_source():
    return report.render_report(full_report())


@pytest.fixture(scope="module")
def page(page_source):
    return Page(page_source)


def test_texts_are_escaped(page, page_source):
    card, _ = cards_of(page_source)
    assert card["question"] == EVIL
    assert card["rows"] == [["reference", "No <b>."]]
    assert "<script>alert" not in page_source
    assert "Atlas <1>" in page.text
    assert len(page.all("script")) == 3  # the cards, and the page's own two
    assert "<a>" in page.text


def test_the_page_needs_no_other_file(page, page_source):
    assert not page.all("link")
    assert not page.all("img")  # the script makes them, of data URIs
    assert all(uri.startswith("data:") for uri in card_data(page_source)["pictures"] if uri)
    assert not [script for script in page.all("script") if "src" in script]
    links = {link["href"] for link in page.all("a") if not link["href"].startswith("#")}
    assert links == {"https://openmoji.org", "./a/report.html"}
    assert "url(http" not in page_source
    assert "@import" not in page_source


def test_pictures_are_embedded_small_and_true(page_source):
    card, _ = cards_of(page_source)
    assert card["sources"][2]["picture"] == ""  # broken, which the script says
    found = []
    for uri in (card["picture"], card["sources"][0]["picture"]):
        kind, data = re.fullmatch(r"data:image/(\w+);base64,(.+)", uri).groups()
        decoded = PIL.Image.open(io.BytesIO(base64.b64decode(data)))
        assert decoded.format.lower() == kind
        assert decoded.size == (300, 225)
        found.append(decoded.convert("RGB").getpixel((150, 100)))
    np.testing.assert_allclose(found, [(255, 0, 0), (0, 0, 255)], atol=3)


def test_sources_are_marked(page_source):
    card, _ = cards_of(page_source)
    assert [place["id"] for place in card["sources"]] == ["s1", "s2", "s3"]
    assert [place["id"] for place in card["sources"] if place["cited"]] == ["s1"]
    assert [place["id"] for place in card["sources"] if place["gold"]] == ["s1", "s3"]
    assert [place["rank"] for place in card["sources"]] == [1, 2, None]


def test_a_source_of_many_cards_is_kept_once():
    sources = [report.CardSource("s1", "a text", picture=picture("blue"))]
    cards = [
        report.Card(f"{n} ?", [report.CardAnswer("", "Yes.")], sources=sources) for n in range(9)
    ]
    data = card_data(report.render_report(report.ReportData("many", cards=cards)))
    assert (len(data["sources"]), len(data["pictures"])) == (1, 1)


def test_filters_by_verdict_and_by_which_answer_is_better():
    scores = [(1, 0.5), (0.5, 1), (1, 1), (0, None), (None, 0)]
    cards = [
        report.Card("?", [report.CardAnswer("a", "", one), report.CardAnswer("b", "", two)])
        for one, two in scores
    ]
    for one, shown in (
        (report.CardFilter("all", [[], []]), [0, 1, 2, 3, 4]),
        (report.CardFilter("a better", [[], []], 1), [0]),
        (report.CardFilter("b better", [[], []], -1), [1]),
        (report.CardFilter("a right, b not wholly", [["right"], ["partly", "wrong"]]), [0]),
        (report.CardFilter("a wrong", [["wrong"], []]), [3]),
    ):
        assert [n for n, card in enumerate(cards) if report.passes(card, one)] == shown, one.label


def test_verdicts_are_counted(page_source):
    counts = {one["label"]: one["count"] for one in card_data(page_source)["filters"]}
    assert counts == {"all": 2, "right": 0, "partly right": 1, "wrong": 0}  # one is not scored


def test_the_best_comes_first():
    """Right answers with pictures, other right ones, then the rest; categories in turn."""
    scores = [0.0, 1.0, 1.0, 0.5, 1.0, None, 1.0]
    pictures = [True, False, True, True, True, True, True]
    assert report.best_first(scores, pictures, "aabaaab") == [4, 2, 6, 1, 3, 0, 5]
    assert report.best_first([], [], []) == []


def test_sections_come_in_the_order_of_interest(page):
    ids = [section["id"] for section in page.all("section")]
    assert ids == ["questions", "scores", "retrieval", "training", "run"]


def test_tables_can_be_sorted(page):
    """Headings are buttons, which a keyboard reaches; numbers are sorted by their value."""
    table = page.all("table", **{"class": "sortable"})
    assert len(table) == 2
    values = [cell["data-value"] for cell in page.all("td") if "data-value" in cell]
    assert {"3", "2", "5", "0.7"} <= set(values)
    titles = [button["title"] for button in page.all("button") if "title" in button]
    assert "webqa_acc/no_lemma" in titles  # the identifier behind the name


def test_plots_have_their_lines(page, page_source):
    assert len(page.all("svg")) == 4  # recall, loss, dev_f1, loss; the empty curve has none
    ids = [attrs["id"] for _, attrs in page.elements if "id" in attrs]
    assert [name for name in ids if name.startswith("recall-line-")] == [
        "recall-line-0",
        "recall-line-1",
        "recall-line-2",
    ]
    curves = [name for name in ids if name.startswith("curve-")]
    assert curves == ["curve-rerank-0", "curve-rerank-1", "curve-answer-0"]
    assert len(ids) == len(set(ids)), "ids repeat on the page"
    for word in ("bm25", "dense", "a$b$_<c>", "loss", "dev_f1"):
        assert word in page.text
    assert [g["data-label"] for g in page.all("g") if "data-label" in g][:3] == [
        *("bm25", "dense", "a$b$_<c>")
    ]
    assert page_source.count("<style") == 1


def test_the_recall_line_goes_where_the_numbers_say(page_source):
    (path,) = re.findall(r'<g id="recall-line-1"[^>]*><path d="([^"]*)"', page_source)
    (x0, y0), (x1, y1) = [
        tuple(map(float, point)) for point in re.findall(r"[ML] ([\d.]+) ([\d.]+)", path)
    ]
    (low,) = re.findall(r'<g id="recall-line-0"[^>]*><path d="M [\d.]+ ([\d.]+)', page_source)
    assert x1 > x0
    # dense rises from 0.5 to 1.0 and bm25 starts at 0.25: y falls in proportion.
    assert (float(low) - y0) * 2 == pytest.approx(y0 - y1, rel=1e-3)


def test_the_best_step_is_marked_where_it_is():
    points = [(0, 1.0), (10, 0.2), (30, 0.7)]
    data = report.ReportData("Run", curves={"answer": {"loss": points}}, best_steps={"answer": 10})
    source = report.render_report(data)
    (path,) = re.findall(r'<g id="curve-answer-0"[^>]*><path d="([^"]*)"', source)
    (mark,) = re.findall(r'<g id="curve-answer-0-best"[^>]*><path d="([^"]*)"', source)
    of_points = [float(x) for x in re.findall(r"[ML] ([\d.]+) [\d.]+", path)]
    of_mark = [float(x) for x in re.findall(r"[ML] ([\d.]+) [\d.]+", mark)]
    assert of_mark == pytest.approx([of_points[1]] * 2)  # upright, at step 10
    assert "-best" not in report.render_report(report.ReportData("Run", curves=data.curves))


def test_tables_show_values_and_intervals(page):
    text = page.text
    assert "0.700 [" in text  # oracle, all categories
    assert "answer accuracy (WebQA, no lemmatizer)" in text
    assert "webqa_acc" not in text
    assert "0.750" in text
    assert "2 min 05 s" in text
    assert "2 min 10 s" in text  # the sum


def test_rendering_is_deterministic(page_source):
    assert report.render_report(full_report()) == page_source


@pytest.mark.parametrize(
    "left_out", ["tables", "curves", "recall", "stages", "cards", "facts", "headline"]
)
def test_missing_parts_are_left_out(left_out):
    data = full_report()
    kept = {field: getattr(data, field) for field in data.__dataclass_fields__ if field != left_out}
    kept["curves"] = {} if left_out == "curves" else {"answer": {"loss": [(0, 1.0)]}}
    kept["bars"] = {}
    page = Page(report.render_report(report.ReportData(**kept)))
    sections = {"scores", "retrieval", "training", "run", "questions"}
    gone = {
        "tables": "scores",
        "curves": "training",
        "recall": "retrieval",
        "cards": "questions",
    }.get(left_out)
    assert {section["id"] for section in page.all("section")} == sections - {gone}
    targets = {link["href"] for link in page.all("a") if link["href"].startswith("#")}
    assert targets == {f"#{name}" for name in sections - {gone}}


def test_a_bare_report_still_renders():
    page = Page(report.render_report(report.ReportData(title="Nothing yet")))
    assert "Nothing yet" in page.text
    assert not page.all("section")


def test_the_file_is_written_whole(tmp_path):
    path = tmp_path / "run" / "report.html"
    report.write_report(path, full_report())
    text = path.read_text(encoding="utf-8")
    assert text == report.render_report(full_report())
    assert text.rstrip().endswith("</html>")
    broken = report.ReportData(title="t", stages=[("prepare", "not a number")])
    with pytest.raises(TypeError):
        report.write_report(path, broken)
    assert path.read_text(encoding="utf-8") == text
    assert [file.name for file in path.parent.iterdir()] == ["report.html"]


def test_curves_are_read_from_metrics(tmp_path):
    path = tmp_path / "metrics.jsonl"
    rows = [
        {"step": 0, "loss": 3.0, "note": "start"},
        {"step": 20, "loss": 2.0, "lr": 0.1},
        {"step": 10, "loss": 2.5, "done": True},
        {"step": 20, "loss": 1.5},  # written again after a resume
        {"step": 30, "loss": float("nan")},
    ]
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n")
    assert report.read_curves(path) == {"loss": [(0, 3.0), (10, 2.5), (20, 1.5)], "lr": [(20, 0.1)]}
    assert report.read_curves(tmp_path / "absent.jsonl") == {}
    path.write_text('{"step": 0, "loss": 1}\n{"loss": 1}\n')
    refuses(r"metrics\.jsonl, line 2", report.read_curves, path)


def test_markdown_and_rich_show_the_same_cells():
    import rich.console

    table = tables.Table(
        "T [bold]",
        ["name", "n", "score"],
        [["a|b", 1234, Interval(0.5, 0.25, 0.75)], ["[red]c", None, 0.1256]],
        "A note.",
    )
    markdown = tables.to_markdown(table)
    assert "| name | n | score |\n| --- | ---: | ---: |" in markdown
    assert "| a\\|b | 1,234 | 0.500 [0.250, 0.750] |" in markdown
    assert "| [red]c | – | 0.126 |" in markdown
    console = rich.console.Console(width=100, record=True, file=io.StringIO())
    console.print(tables.to_rich(table))
    shown = console.export_text()
    for word in ("T [bold]", "a|b", "1,234", "0.500 [0.250, 0.750]", "[red]c", "–", "A note."):
        assert word in shown


def test_tables_name_scores_for_people_and_their_identifiers_below():
    table = tables.Table("T: webqa_acc/official", ["row", "recall@5"], [["mrr", 0.5]], "A note.")
    lines = tables.to_markdown(table).splitlines()
    assert lines[0] == "**T: answer accuracy (WebQA)**"
    assert "| mean reciprocal rank | 0.500 |" in lines
    assert lines[-1] == (
        "A note. Scores: answer accuracy (WebQA) = webqa_acc/official, mean reciprocal rank = mrr."
    )


def test_a_table_with_a_cell_too_many_is_refused():
    refuses("2 cells for 1 columns", tables.Table, "T", ["a"], [["x", "y"]], error=ValueError)
