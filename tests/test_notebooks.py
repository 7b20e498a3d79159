"""Notebooks run on real (tiny) runs, store no output and define nothing."""

import ast
import json
import shutil
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOKS = sorted(Path(__file__).parent.parent.glob("notebooks/*.ipynb"))
TINY = (
    "model=gru model.width=8 model.depth=1 task.length=16 task.pairs=2 task.vocab_size=17 population.seeds=2 "
    "train.steps=2 train.batch_size=4 train.eval_batches=1 measure.recall.batches=1 measure.recall.batch_size=4"
)


@pytest.fixture(scope="module")
def runs(command, tmp_path_factory):
    """A directory of two runs: one trained, and its copy under another name."""
    directory = tmp_path_factory.mktemp("notebooks")
    typed = command(TINY, directory)
    assert typed.code == 0, typed.lines
    shutil.copytree(directory / "runs/mqar/gru", directory / "runs/mqar/copy")
    return directory / "runs"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_shows_every_run(path, runs, monkeypatch):
    monkeypatch.setenv("SEQLAB_RUNS", str(runs))
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(notebook, timeout=120, resources={"metadata": {"path": str(path.parent)}}).execute()
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    shown = [output.data for output in outputs if "data" in output]
    # accuracy, recall by gap and recall by pairs
    assert sum("image/png" in data for data in shown) >= 3
    assert all(name in json.dumps(shown) for name in ("mqar/gru", "mqar/copy"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_stores_no_output_and_defines_nothing(path):
    for cell in nbformat.read(path, as_version=4).cells:
        if cell.cell_type != "code":
            continue
        assert not cell.outputs and cell.execution_count is None
        code = "\n".join(line for line in cell.source.splitlines() if not line.startswith("%"))
        assert not any(
            isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Lambda) for node in ast.walk(ast.parse(code))
        )


def test_there_are_notebooks():
    assert NOTEBOOKS
