"""What `mmqa plan` says of an engine on eight devices lies there when `mmqa prompt` runs it."""

import pytest
from planned_engine import plan_and_run


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        return plan_and_run(tmp_path_factory.mktemp("tiny") / "model", patch)


CASES = ("auto", "tensor")


@pytest.mark.parametrize("case", CASES)
def test_on_each_device_lies_what_the_plan_says(found, case):
    planned, held = found[case]["planned"], found[case]["held"]
    assert len(held) == 8
    for of_device in held:
        assert of_device == planned


@pytest.mark.parametrize("case", CASES)
def test_answers_are_those_of_one_device(found, case):
    for got, want in zip(found[case]["answers"], found["one"]["answers"], strict=True):
        assert got["tokens"] == want["tokens"]
        assert got["logprobs"] == pytest.approx(want["logprobs"], abs=1e-4)


def test_the_devices_of_the_process_are_used(found):
    sizes = found["auto"]["sizes"]
    assert (sizes["devices"], sizes["mesh"]["data"], sizes["slots"]) == (8, 8, 16)
    assert found["tensor"]["sizes"]["mesh"] == {"data": 4, "fsdp": 1, "tensor": 2}
    assert found["one"]["sizes"]["devices"] == 1


@pytest.mark.parametrize("scanned", ["scanned", "unscanned"])
def test_copies_of_the_weights_exchange_nothing_but_tokens(found, scanned):
    """Each computes an eighth, and neither rows nor cache move."""
    programs = found[scanned]
    assert not programs["prefill"]["collectives"]
    # Of the tokens and their log-probabilities, and whether any row samples with top_k or top_p.
    assert set(programs["decode"]["collectives"]) <= {"all-gather", "all-reduce"}
    assert programs["decode"]["gathered"] <= 2 * 16
    for one in ("prefill", "decode"):
        assert programs[one]["flops"] == pytest.approx(programs[one]["of_one"] / 8, rel=0.02)
