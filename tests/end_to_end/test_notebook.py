"""The notebooks of configs/ run from their first cell to their last, and show what they promise."""

import os
from pathlib import Path
from types import SimpleNamespace

import nbformat
import pytest
from jupyter_client.provisioning import LocalProvisioner
from nbclient import NotebookClient

from tests.forks import server

CONFIGS = Path(__file__).parents[2] / "configs"
IN_FOLDER = """import os, runpy, sys
os.chdir(sys.argv.pop(1))
runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)"""


async def launch_fork(provisioner, command, *, cwd, env, **_):
    """As LocalProvisioner.launch_kernel; the process group of a fork is not its own."""
    module = command.index("-m") + 1
    fork = server().start(["-c", IN_FOLDER, str(cwd), *command[module:]], env)
    provisioner.pid = fork.pid
    # What is used of `subprocess.Popen`.
    provisioner.process = SimpleNamespace(
        poll=fork.poll,
        wait=fork.communicate,
        send_signal=fork.send_signal,
        kill=fork.kill,
        **dict.fromkeys(("stdin", "stdout", "stderr")),
    )
    return provisioner.connection_info


def run(name, tmp_path_factory, cache) -> dict[str, str]:
    """What each cell of a notebook prints, by the cell's name."""
    with pytest.MonkeyPatch.context() as patch:
        # As a user starts it: in a folder that is not the checkout.
        patch.setenv("PYTHONPATH", str(CONFIGS.parent))
        patch.setenv("MMQA_CACHE", str(cache))
        patch.setenv("JAX_PLATFORMS", "cpu")
        patch.setattr(LocalProvisioner, "launch_kernel", launch_fork)
        notebook = nbformat.read(CONFIGS / name, as_version=4)
        folder = tmp_path_factory.mktemp("notebook")
        client = NotebookClient(
            notebook, timeout=600, resources={"metadata": {"path": str(folder)}}
        )
        client.execute(env=dict(os.environ))
    assert not list(folder.iterdir())
    return {
        cell["id"]: "".join(
            output["text"] for output in cell.outputs if output.get("name") == "stdout"
        )
        for cell in notebook.cells
        if cell.cell_type == "code"
    }


@pytest.fixture(scope="module")
def printed(tmp_path_factory, cli_cache) -> dict[str, str]:
    """Of corpus.ipynb."""
    return run("corpus.ipynb", tmp_path_factory, cli_cache)


@pytest.mark.parametrize("name", ["corpus.ipynb", "ports.ipynb"])
def test_no_outputs_are_committed(name):
    notebook = nbformat.read(CONFIGS / name, as_version=4)
    nbformat.validate(notebook)
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in notebook.cells)
    assert set(notebook.metadata) == {"kernelspec", "language_info"}


def test_the_search_finds_what_is_asked_for(printed):
    assert "Fiji: " in printed["search"].splitlines()[0]


def test_the_answer_is_right_and_cited(printed):
    answer, *sources = printed["answer"].splitlines()
    assert "sol" in answer.replace(".", "").split()
    assert sources == ["[1] Peru: The capital of Peru is Lima. Its currency is the sol."]


def test_a_question_that_nothing_answers_is_refused(printed):
    assert printed["refused"] == "False Not found in the sources.\n"


def test_a_port_learns_and_writes(tmp_path_factory, cli_cache):
    printed = run("ports.ipynb", tmp_path_factory, cli_cache)
    assert printed["forward"].startswith("(1, 10) (1, 10, 49152) ")
    assert printed["train"].endswith(" True\n")
    assert "Lima" in printed["generate"]
    assert "fsdp" in printed["mesh"]
