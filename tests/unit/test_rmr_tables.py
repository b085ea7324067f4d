"""`mmqa tables rmr`: every printed row of the ablations, and what rows on a server need."""

import pytest
from cli_runs import done


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """A working directory without data, weights or runs."""
    monkeypatch.chdir(tmp_path)


# RMR (Tan et al., 2024): the column AVG of tables 3 and 4, every printed row, in percent.
RMR_TABLE_3 = {
    "Gemini w/o retrieval": 58.08,
    "Gemini w/ R = 1": 87.69,
    "Gemini w/ R = 2": 87.62,
    "Gemini w/ R = 3": 91.75,
    "Gemini w/ R = 4": 88.33,
    "Gemini w/ R = 5": 87.22,
}
RMR_TABLE_4 = {
    "LLaVA-1.5": {"All": (70.86, 78.52), "T&I": (71.89, 78.33), "T": (69.92, 78.69)},
    "Qwen-VL": {"All": (64.89, 74.82), "T&I": (67.03, 76.50), "T": (62.95, 73.29)},
    "InternLM-XComposer2-VL": {"All": (86.82, 92.15), "T&I": (89.14, 96.03), "T": (84.71, 88.62)},
    "Gemini": {"All": (58.08, 91.75), "T&I": (64.01, 89.69), "T": (52.70, 93.62)},
}


def test_every_row_of_rmrs_ablations():
    """Also those that repeat a row of table 1."""
    average = {
        (row["table"], row["row"]): 100 * row["published"]
        for row in done("tables", "rmr")["rows"]
        if row["table"] in ("3", "4") and row["column"] == "AVG"
    }
    expected = {("3", row): value for row, value in RMR_TABLE_3.items()}
    for model, figures in RMR_TABLE_4.items():
        for questions, (without, retrieved) in figures.items():
            expected["4", f"{model}-{questions}"] = without
            expected["4", f"{model}-{questions} w/ RMR"] = retrieved
    assert average == pytest.approx(expected)


def test_a_server_is_needed_until_the_environment_names_one(monkeypatch):
    def rows_in_need() -> set[str]:
        rows = done("tables", "rmr")["rows"]
        assert {"qwen_vl", "llava"} <= {row["config_row"] for row in rows}
        return {
            row["config_row"]
            for row in rows
            if any(need.partition(": ")[0] == "OPENAI_BASE_URL" for need in row["needs"])
        }

    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    found = rows_in_need()
    assert "qwen_vl" in found
    assert "llava" not in found
    monkeypatch.setenv("OPENAI_BASE_URL", "http://localhost:8000/v1")
    assert "qwen_vl" not in rows_in_need()
