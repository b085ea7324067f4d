"""`mmqa tables`: every published figure, its command, what it needs, and whether it was reached."""

import argparse
import json
import shlex
from pathlib import Path

import pytest
from cli_runs import ROOT, done, mmqa, succeeded

from mmqa_jax.cli import command, make_parser
from mmqa_jax.commands.tables import NAMES, add_flags
from mmqa_jax.core.config import load_config, load_module
from mmqa_jax.runs.row import find_setting, read_row
from mmqa_jax.runs.tables import PAPERS, datasets

pytestmark = pytest.mark.slow

KEYS = {
    *("paper", "table", "row", "column", "published", "tolerance"),
    *("command", "needs", "shut_down", "measured", "status"),
}
# WebQA (Chang et al., CVPR 2022), in percent. Table 6: FL, Acc, FL*Acc, source F1.
TABLE_6 = {
    "vlp_q_only": (34.9, 22.2, 13.4, None),
    "vlp": (42.6, 36.7, 22.6, 68.9),
    "vlp_oracle": (44.6, 40.4, 24.5, None),
    "vlp_vinvl": (44.2, 38.9, 24.1, 70.9),
    "vlp_vinvl_oracle": (45.7, 42.2, 25.9, None),
    "pica_q_only": (47.6, 43.4, 28.8, None),
    "pica": (57.1, 61.6, 40.1, None),
    "clip2_vlp": (34.2, 24.1, 14.6, 12.0),
    "clip20_vlp": (36.1, 27.2, 16.1, 24.0),
    "human": (55.1, 94.3, 52.4, 90.5),
}
# Table 7: source F1 of questions with pictures, with snippets.
TABLE_7 = {
    "bm25_restricted": (25.61, 43.75),
    "vlp": (68.13, 69.48),
    "bm25_full": (20.43, 28.15),
    "clip2": (9.71, 13.96),
    "clip20_vlp": (21.68, 26.01),
}
# Table 8: accuracy of yes/no, multiple choice, color, shape, number, others, text.
TABLE_8 = {
    "vlp_q_only": (16.1, 49.0, 3.9, 0.8, 0.5, 27.9, 18.1),
    "vlp_oracle": (17.2, 52.9, 2.8, 0.0, 0.5, 28.6, 50.4),
    "vlp_i": (11.6, 55.3, 3.9, 2.4, 0.5, 26.3, None),
    "vlp_t": (None, None, None, None, None, None, 48.6),
    "pica_q_only": (26.7, 70.1, 30.8, 19.0, 14.2, 45.3, 42.8),
    "pica": (27.4, 70.1, 42.5, 17.3, 13.8, 48.7, 74.8),
    "human": (100, 96.8, 95.8, 94.8, 95.0, 87.8, 94.0),
}
# Recall@k of questions with pictures, with snippets, as the authors' notebooks printed it.
KS = (2, 10, 20, 50, 100, 200, 500, 1000, 2000)
BM25_NOTEBOOK, CLIP_NOTEBOOK = "BM25_full_retrieval.ipynb", "CLIP_encodings.ipynb"
RECALLS = {
    (CLIP_NOTEBOOK, "clip2", "image"): (
        *(12.947, 30.153, 38.958, 52.252, 62.514),
        *(71.262, 80.918, 86.706, 91.354),
    ),
    (CLIP_NOTEBOOK, "clip2", "text"): (
        *(13.925, 26.106, 31.544, 38.443, 43.625),
        *(48.781, 55.737, 60.235, 64.401),
    ),
    (BM25_NOTEBOOK, "bm25_full", "image"): (25.97,),
    (BM25_NOTEBOOK, "bm25_full", "text"): (28.10,),
    (BM25_NOTEBOOK, "bm25_restricted", "image"): (32.06,),
    (BM25_NOTEBOOK, "bm25_restricted", "text"): (43.62,),
}
# How the authors computed the F1 of a row: VLP's evaluation, or a notebook of theirs.
F1 = {
    **dict.fromkeys(
        ("bm25_restricted", "bm25_full", "bm25_known", "clip2", "clip2_vlp"), "source_f1/notebook"
    ),
    "clip20_vlp": "source_f1/clip_notebook",
}
COLUMNS = {
    "6": ("fl", "acc", "fl_acc", "source_f1"),
    "7": ("source_f1_image", "source_f1_text"),
    "8": tuple(
        f"acc_{c}" for c in ("YesNo", "choose", "color", "shape", "number", "Others", "text")
    ),
}
PUBLISHED = {
    (table, row, column): value
    for table, rows in (("6", TABLE_6), ("7", TABLE_7), ("8", TABLE_8))
    for row, values in rows.items()
    for column, value in zip(COLUMNS[table], values, strict=True)
    if value is not None
}
PUBLISHED |= {
    (notebook, row, f"recall_{k}_{kind}"): value
    for (notebook, row, kind), values in RECALLS.items()
    for k, value in zip(KS, values, strict=False)
}
CLASSIFIER = "clip2_classified"
OURS = {f"llm_{s}" for s in ("question_only", "oracle", "retrieved", "restricted", "reranked")}
PUBLISHED["bert-base-cased.txt", CLASSIFIER, "modality"] = 99.987
PUBLISHED[BM25_NOTEBOOK, "bm25_known", "source_f1_image"] = 20.19
PUBLISHED[BM25_NOTEBOOK, "bm25_known", "source_f1_text"] = 33.42
PUBLISHED["appendix D", "clip2_unknown", "recall_2000_image"] = 0.0
NOT_RUN = {"human": "cited only"}


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """A working directory without data, weights or runs."""
    folder = tmp_path / "empty"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture(scope="module")
def everything(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("empty"))
        return done("tables")["rows"]


@pytest.fixture
def listed(everything):
    return [r for r in everything if r["paper"] == "webqa" and r["published"] is not None]


def of_figure(listed: list[dict], table: str, row: str, column: str) -> dict:
    (found,) = (
        one for one in listed if (one["table"], one["config_row"], one["column"]) ==
        (table, row, column)
    )  # fmt: skip
    return found


def test_every_published_figure(listed):
    found = {
        (row["table"], row["config_row"], row["column"]): 100 * row["published"] for row in listed
    }
    assert len(found) == len(listed)  # each once
    assert found == pytest.approx(PUBLISHED)


def test_the_format(listed):
    for row in listed:
        assert row.keys() >= KEYS
        assert row["paper"] == "webqa"
        assert 0 < row["tolerance"] <= 0.05
        assert row["measured"] is None
        assert isinstance(row["needs"], list)
        assert row["row"]


def test_models_that_were_shut_down(listed):
    """PICa's davinci cannot be asked again; VLP's weights can be trained, people be cited."""
    for row in listed:
        assert ("4 January 2024" in row["shut_down"]) == row["config_row"].startswith("pica")
    ended = mmqa("tables", "mmbench")
    assert "Gemini 1.0 Pro Vision was shut down on 9 April 2025" in " ".join(ended.out.split())
    assert "davinci" not in ended.out


def test_scorers_are_official(listed):
    for row in listed:
        name, column = row["config_row"], row["column"]
        if column.startswith("source_f1"):
            assert row["scorer"] == F1.get(name, "source_f1/official")
        elif column.startswith("recall"):
            assert row["scorer"] == f"recall@{column.split('_')[1]}"
        elif name == CLASSIFIER:
            assert row["scorer"] == "modality_accuracy"
        else:
            scorer = {"fl": "webqa_fl", "fl_acc": "webqa_fl_acc"}.get(column, "webqa_acc")
            assert row["scorer"] == f"{scorer}/official"


def test_kats_figures_are_by_kats_scorer(everything):
    """Those of its README and the one that MAVL cites: okvqa_ems of guilk/KAT."""
    scorers = {
        (row["table"], row["config_row"]): row["scorer"]
        for row in everything
        if row["config_row"].startswith("kat_")
    }
    assert scorers == {
        ("1", "kat_large"): "vqa_accuracy/kat",
        ("KAT, README.md", "kat_base"): "vqa_accuracy/kat",
        ("KAT, README.md", "kat_large"): "vqa_accuracy/kat",
        ("KAT, README.md", "kat_large_explicit"): "vqa_accuracy/kat",
    }


@pytest.mark.parametrize("row", ["vlp", "clip2_vlp", "clip20_vlp"])
def test_table_6_has_the_means_of_table_7(row, listed):
    """Of 3,464 image and 4,076 text questions: its source F1 was computed by the same scorer."""
    of_table_7 = {"clip2_vlp": "clip2"}.get(row, row)
    image, text = (
        of_figure(listed, "7", of_table_7, f"source_f1_{kind}") for kind in ("image", "text")
    )
    figure = of_figure(listed, "6", row, "source_f1")
    mean = (3464 * image["published"] + 4076 * text["published"]) / 7540
    assert figure["published"] == pytest.approx(mean, abs=5.1e-4)
    assert figure["scorer"] == image["scorer"] == text["scorer"]


def test_recall_at_2000_is_searched_exactly():
    for name in ("clip2", "clip2_unknown", "bm25_full", "bm25_known"):
        config = load_config(f"{ROOT}/configs/webqa/tables.py:{name}")
        assert config.options.top_k == 2000
    kinds = {"clip2": "exact", "clip2_unknown": "exact", "clip2_vlp": "any", "clip20_vlp": "any"}
    for name, kind in kinds.items():
        config = load_config(f"{ROOT}/configs/webqa/tables.py:{name}")
        assert config.parts.retriever.index_kind == kind
    assert "--kind=exact" in dict(config.made_by)[config.parts.retriever.index]


def test_how_many_sources_the_rows_cite():
    """Restricted: every one above the threshold; full scale: the best always, two at most."""
    for name, select in {"vlp": "above", "vlp_vinvl": "above", "clip20_vlp": "best"}.items():
        options = load_config(f"{ROOT}/configs/webqa/tables.py:{name}").options
        assert (options.select, options.threshold) == (select, 0.2)


def test_what_is_not_here_is_needed(listed):
    for row in listed:
        expected = NOT_RUN.get(row["config_row"], "needs")
        assert row["status"] == expected, row
        assert bool(row["needs"]) == (expected == "needs")
        assert bool(row["command"]) == (expected == "needs")
    needs = of_figure(listed, "6", "clip20_vlp", "acc")["needs"]
    named = {need.partition(": ")[0] for need in needs}
    assert named == {"data/webqa", "weights/clip", "runs/clip", "runs/vlp_select", "runs/vlp_qa"}
    by_path = dict(need.split(": ", 1) for need in needs)
    assert "mmqa prepare webqa" in by_path["data/webqa"]
    assert "imgs.tsv" in by_path["data/webqa"]
    assert "mmqa convert --model=clip" in by_path["weights/clip"]
    assert "mmqa train --config=configs/webqa/vlp_select.py" in by_path["runs/vlp_select"]
    # Fluency needs BARTScore's weights besides.
    fluency = of_figure(listed, "6", "clip20_vlp", "fl")["needs"]
    assert fluency[:-1] == needs
    assert "bart" in fluency[-1]


def test_what_is_here_can_be_run(elsewhere):
    for folder in ("data/webqa", "runs/vlp_select", "runs/vlp_qa"):
        (elsewhere / folder).mkdir(parents=True)
    listed = done("tables", "webqa")["rows"]
    status = {(row["config_row"], row["column"]): row["status"] for row in listed}
    assert status["bm25_full", "source_f1_text"] == "not run"
    assert status["vlp", "acc"] == status["vlp", "source_f1"] == "not run"
    assert status["vlp", "fl"] == status["vlp", "fl_acc"] == "needs"
    assert status["clip2", "source_f1_text"] == status["vlp_vinvl", "acc"] == "needs"
    assert of_figure(listed, "6", "vlp", "acc")["needs"] == []


def commands_of(paper: str, everything: list[dict]) -> dict[str, str]:
    rows = (row for row in everything if row["paper"] == paper and row["command"])
    return {row["config_row"]: row["command"] for row in rows}


@pytest.mark.parametrize(
    ("paper", "rows"),
    [("webqa", ({row for _, row, _ in PUBLISHED} | OURS) - NOT_RUN.keys()), ("atlas", None)],
)
def test_every_command_is_one(paper, rows, everything):
    """It parses, and its config is a row with the options and parts that its setting takes."""
    commands, parser = commands_of(paper, everything), make_parser()
    tables = load_module(ROOT / f"configs/{paper}/tables.py")
    assert commands.keys() == set(tables.MODES) == (rows or set(tables.MODES))
    for row, text in commands.items():
        program, *words = shlex.split(text)
        assert program == "mmqa"
        arguments = parser.parse_args(words)
        assert command(arguments.verb).__name__ == "mmqa_jax.commands.run"
        assert arguments.config == f"configs/{paper}/tables.py:{row}"
        assert Path(arguments.workdir).name == row
        config = tables.get_config(row)
        assert config.row == row
        read_row(config)
        # Where every input comes from is known.
        parts = [p.to_dict() for name, p in config.parts.items() if name != "llm"]
        parts += [part["similarity"] for part in parts if part.get("similarity")]
        keys = ("model", "index", "modality_model", "text_model", "image_model", "captions", "tags")
        paths = {config.data.dir, *(part.get(key) for part in parts for key in keys)}
        assert {path for path in paths if path} - {"minilm"} <= dict(config.made_by).keys()


def write_scores(folder: Path, row: str, **changes) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    record = {
        "dataset": "webqa", "row": row, "split": "val", "limit": None, "n": 100,
        "scores": {"source_f1/official": 0.659, "webqa_acc/official": 0.336},
        "intervals": {"source_f1/official": [0.6, 0.71]},
        "n_by_scorer": {"source_f1/official": 100},
        "by_category": {"text": {"webqa_acc/official": 0.5}},
        "by_modality": {
            "image": {"source_f1/official": 0.7112}, "text": {"source_f1/official": 0.7249},
        },
    }  # fmt: skip
    (folder / "scores.json").write_text(json.dumps({**record, **changes}))


def test_measured_figures_pass_within_the_tolerance(elsewhere):
    """Published 68.9, 36.7, 68.13, 69.48; the tolerance is 3 points."""
    write_scores(elsewhere / "runs" / "vlp", "vlp")
    for workdir in ("runs", "runs/vlp"):  # the rows' folders, or the row's own
        listed = done("tables", "webqa", f"--workdir={workdir}")["rows"]
        found = {
            (row["table"], row["column"]): (row["measured"], row["status"])
            for row in listed
            if row["config_row"] == "vlp"
        }
        assert found == {
            ("6", "source_f1"): (0.659, "pass"),  # 3.0 points below
            ("6", "acc"): (0.336, "fail"),  # 3.1 points below
            ("6", "fl"): (None, "needs"),
            ("6", "fl_acc"): (None, "needs"),
            ("7", "source_f1_image"): (0.7112, "pass"),  # 2.99 points above
            ("7", "source_f1_text"): (0.7249, "fail"),  # 3.01 points above
        }
        others = {row["status"] for row in listed if row["config_row"] != "vlp"}
        assert others == {"needs", "cited only"}


def test_categories_are_measured_by_their_name(elsewhere):
    write_scores(elsewhere / "vlp_oracle", "vlp_oracle")
    listed = done("tables", "webqa", f"--workdir={elsewhere}")["rows"]
    assert of_figure(listed, "8", "vlp_oracle", "acc_text")["measured"] == 0.5
    assert of_figure(listed, "8", "vlp_oracle", "acc_text")["status"] == "pass"  # 50.4
    assert of_figure(listed, "8", "vlp_oracle", "acc_color")["measured"] is None


@pytest.mark.parametrize(
    ("key", "value", "shown"),
    [
        ("limit", 100, "first 100 only"),
        ("split", "train", "split train"),
        ("sample", 50, "50 questions only"),
    ],
)
def test_a_part_of_the_split_is_not_judged(key, value, shown, elsewhere):
    write_scores(elsewhere / "vlp", "vlp", **{key: value})
    ended = mmqa("tables", "webqa", f"--workdir={elsewhere}", "--markdown", "--json")
    figure = of_figure(ended.value["rows"], "6", "vlp", "source_f1")
    assert (figure["measured"], figure["status"]) == (0.659, "partial")
    assert key == "split" or figure[key] == value
    measured = "| vlp | source F1 | 0.689 | 0.659 [0.600, 0.710] | 100 |"
    assert f"{measured} partial ({shown}) |" in ended.out


def test_scores_of_another_row_do_not_count(elsewhere):
    write_scores(elsewhere / "vlp", "vlp_oracle")
    listed = done("tables", "webqa", f"--workdir={elsewhere}")["rows"]
    assert {row["measured"] for row in listed} == {None}


def test_the_tables_that_are_shown(elsewhere):
    write_scores(elsewhere / "vlp", "vlp")
    ended = succeeded("tables", "webqa", f"--workdir={elsewhere}", "--markdown")
    for table in "678":
        assert f"webqa, table {table}" in ended.out
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in ended.out.splitlines()]
    (row,) = (row for row in rows if row[:2] == ["Restr. VLP, predicted sources", "vlp"])
    assert row[2:] == ["0.426", "0.367", "0.226", "0.689"]
    (row,) = (row for row in rows if row[:2] == ["Human, oracle sources", "(cited only)"])
    assert row[2:] == ["0.551", "0.943", "0.524", "0.905"]
    (row,) = (row for row in rows if row[:2] == ["vlp", "source F1"])
    assert row[2:] == ["0.689", "0.659 [0.600, 0.710]", "100", "pass"]
    (row,) = (row for row in rows if row[:1] == ["configs/webqa/tables.py:vlp_oracle"])
    assert row[1] == "data/webqa; runs/vlp_qa"


def test_intervals_and_numbers_of_questions(elsewhere):
    """Over all questions they are those of scores.json; of a category there is no interval."""
    write_scores(elsewhere / "vlp", "vlp", n_by_category={"text": 55})
    listed = done("tables", "webqa", f"--workdir={elsewhere}")["rows"]
    figure = of_figure(listed, "6", "vlp", "source_f1")
    assert (figure["interval"], figure["n"]) == ([0.6, 0.71], 100)
    image = of_figure(listed, "7", "vlp", "source_f1_image")
    assert (image["measured"], image["interval"], image["n"]) == (0.7112, None, None)
    assert of_figure(listed, "6", "vlp_oracle", "acc")["interval"] is None


def test_the_rows_of_ours_that_were_run(elsewhere):
    """Beside the papers', with value, interval and n; OpenStax's scores say `corpus`."""
    scores = {"choice_accuracy/recorded_choice": 0.5}
    more = {
        "scores": scores, "intervals": {next(iter(scores)): [0.4, 0.6]},
        "n_by_scorer": {next(iter(scores)): 313}, "by_category": {}, "by_modality": {},
    }  # fmt: skip
    folder = elsewhere / "openstax" / "smollm2_k0"
    write_scores(folder, "smollm2_k0", dataset="corpus", split="test", **more)
    ended = mmqa("tables", "rmr", f"--workdir={elsewhere}", "--markdown", "--json")
    assert "rmr, ours, openstax" in ended.out
    assert "| smollm2_k0 | choice accuracy | 0.500 [0.400, 0.600] | 313 |" in ended.out
    measured = [row for row in ended.value["rows"] if row["measured"] is not None]
    assert [(row["table"], row["status"], row["n"]) for row in measured] == [
        ("ours, openstax", "measured", 313)
    ]


def test_what_the_language_model_was_asked_stands_beside_the_scores(elsewhere):
    used = {"calls_per_question": 6.983, "prompt_tokens_per_question": 1849.2, "calls": 6983}
    folder = elsewhere / "okvqa"
    soft = "vqa_accuracy/soft_labels"
    more = {
        "scores": {soft: 0.199}, "intervals": {soft: [0.176, 0.222]}, "n_by_scorer": {soft: 1000},
        "by_category": {}, "by_modality": {}, "dataset": "okvqa", "split": "test",
    }  # fmt: skip
    write_scores(folder / "smollm2_mavl", "smollm2_mavl", llm=used, **more)
    write_scores(folder / "vqa_model_alone", "vqa_model_alone", **more)
    lines = mmqa("tables", "mavl", f"--workdir={elsewhere}", "--markdown").out.splitlines()
    assert "| n | LLM calls a question | prompt tokens a question | status |" in "".join(lines)
    name = "VQA accuracy (soft labels)"
    asked = f"| smollm2_mavl | {name} | 0.199 [0.176, 0.222] | 1,000 | 6.983 | 1,849 |  |"
    assert asked in lines
    alone = f"| vqa_model_alone | {name} | 0.199 [0.176, 0.222] | 1,000 | – | – |  |"
    assert alone in lines


def test_tables_fit_a_terminal_of_120_characters(elsewhere):
    write_scores(elsewhere / "vlp", "vlp")
    for paper in ("webqa", "pica", "rmr", "llava", "atlas"):
        lines = mmqa("tables", paper, f"--workdir={elsewhere}").out.splitlines()
        assert max(map(len, lines)) <= 120
        assert not any("…" in line for line in lines)


def test_all_papers(elsewhere, everything):
    assert {row["paper"] for row in everything} == set(PAPERS)
    of_atlas = [row for row in everything if row["paper"] == "atlas"]
    assert of_atlas == done("tables", "atlas")["rows"]


def test_every_paper_can_be_named():
    parser = argparse.ArgumentParser()
    add_flags(parser)
    names = list(dict.fromkeys((*PAPERS, *datasets())))
    assert sorted(names) == sorted(NAMES)
    assert [parser.parse_args([name]).name for name in names] == names


def test_the_rows_of_a_data_set(elsewhere, everything):
    ended = mmqa("tables", "scienceqa", "--json")
    rows = ended.value["rows"]
    assert {row["paper"] for row in rows} == {"rmr", "llava", "mmcot"}
    assert {
        row["command"].partition(" --config=configs/")[2][:9] for row in rows if row["command"]
    } == {"scienceqa"}
    of_webqa = [row for row in everything if row["paper"] == "webqa"]
    assert done("tables", "webqa")["rows"] == of_webqa
    assert "rmr, rows to run" in ended.out
    assert "llava, rows to run" in ended.out


def test_systems_without_a_command_are_named(elsewhere):
    """Those that are only cited; not what is run here, nor its figures of another split."""
    (note,) = (
        line for line in mmqa("tables", "mavl", "--markdown").out.splitlines() if "Cited" in line
    )
    _, _, named = note.partition(" with no command here: ")
    cited = named.rstrip(".").split(", ")
    assert {"MUTAN+AN", "KRISP", "LXMERT"} <= set(cited)
    assert not {"KAT", "Ours", "Prophet-LLaMA"} & set(cited)


def write_demo(folder: Path, questions: int) -> None:
    """The row `full` as a demo leaves it."""
    scorers = ("webqa_acc/no_lemma", "source_f1/official")
    more = {
        "scores": dict(zip(scorers, (0.67, 0.5), strict=True)), "intervals": {}, "by_modality": {},
        "by_category": {}, "n_by_scorer": dict.fromkeys(scorers, questions),
        "dataset": "atlas", "split": "test", "sample": questions,
    }  # fmt: skip
    write_scores(folder / "rows" / "full", "full", **more)


def test_the_rows_of_a_demo_pass_or_fail(elsewhere):
    """Found in workdir-demo, where the demo was made; published .68 and .882, within .03."""
    write_demo(elsewhere / "workdir-demo", 300)
    for flags in (["--workdir=workdir-demo"], ["--workdir=workdir-demo/rows"], []):
        ended = mmqa("tables", "atlas", *flags, "--markdown", "--json")
        rows = [row for row in ended.value["rows"] if row["config_row"] == "full"]
        found = {row["column"]: row["status"] for row in rows}
        assert found == {"webqa_acc/no_lemma": "pass", "source_f1/official": "fail"}
    lines = ended.out.splitlines()
    (state,) = (line for line in lines if line.startswith("| configs/atlas/tables.py:full |"))
    assert state == "| configs/atlas/tables.py:full | run: workdir-demo/rows/full |"
    assert any(line.startswith("| configs/atlas/tables.py:oracle | data/atlas;") for line in lines)


def test_a_whole_run_stands_before_a_part_of_one(elsewhere):
    write_demo(elsewhere / "runs" / "tables" / "x", 40)
    write_scores(elsewhere / "runs" / "tables" / "full", "full", dataset="atlas", sample=40)
    write_demo(elsewhere / "workdir-demo", 300)
    rows = done("tables", "atlas")["rows"]
    (place,) = {row["workdir"] for row in rows if row["config_row"] == "full"}
    assert place == "workdir-demo/rows/full"


def test_wrong_flags(refused):
    refused("tables", "vilt", message=r"vilt.*webqa.*pica.*rmr.*mavl.*atlas")
    refused("tables", "webqa", "--workdir=nowhere", message=r"--workdir=nowhere: no such folder")


@pytest.mark.parametrize(
    "dataset",
    [
        "okvqa",
        "aokvqa",
        "scienceqa",
        "mmbench",
        "seedbench",
        "openstax",
        "multimodalqa",
        "infoseek",
        "evqa",
        "mbeir",
        "vidore",
        "bright",
        "mmmu",
        "mragbench",
        "mathvista",
        "dynvqa",
        "mmsearch",
        "fvqa",
        "livevqa",
        "mmeb",
        "mmlongbench",
        "citevqa",
    ],
)
def test_rows_of_the_benchmarks(dataset, everything):
    """Every row is one that `mmqa run` takes, and where its inputs come from is known."""
    tables = load_module(ROOT / f"configs/{dataset}/tables.py")
    listed = {r["config_row"] for r in everything if f"configs/{dataset}/" in r["command"]}
    assert listed == set(tables.MODES)
    for name in tables.MODES:
        config = tables.get_config(name)
        read_row(config)
        # All are there, so that each can be overridden.
        assert {*config.options} == {*find_setting(config.system, config.setting).options({})}
        assert config.dataset == {"openstax": "corpus"}.get(dataset, dataset)
        keys = ("data", "text_model", "image_model", "index", "captions", "tags")
        keys += ("candidates", "examples", "run")
        named = [part.get(key) for part in config.parts.values() for key in keys]
        searched = config.data.get("sources")
        paths = {config.data.dir, *filter(None, (*named, searched))} - {"minilm"}
        assert paths <= dict(config.made_by).keys()
