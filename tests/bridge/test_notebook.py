"""Every notebook runs as it is, from its folder and from the root, and is stored with its outputs."""

from pathlib import Path

import pytest

nbclient = pytest.importorskip("nbclient")
nbformat = pytest.importorskip("nbformat")
pytest.importorskip("transformers")
pytest.importorskip("matplotlib")

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def execute(notebook, folder):
    resources = {"metadata": {"path": str(folder)}}
    return nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3", resources=resources).execute()


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_runs(path):
    stored = nbformat.read(path, as_version=4)
    nbformat.validate(stored)
    execute(nbformat.from_dict(stored), path.parent)


def test_finds_the_library_from_the_root():
    notebook = nbformat.read(NOTEBOOKS[0], as_version=4)
    notebook.cells = [*code_cells(notebook)[:1], nbformat.v4.new_code_cell("import bridge; print(bridge.__file__)")]
    (output,) = execute(notebook, ROOT).cells[-1].outputs
    assert Path(output.text.strip()) == ROOT / "bridge" / "__init__.py"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_stored_with_outputs(path):
    cells = code_cells(nbformat.read(path, as_version=4))
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell.outputs]
    assert sum("image/png" in output.get("data", {}) for output in outputs) >= 4
    assert not [output for output in outputs if output.output_type == "error" or output.get("name") == "stderr"]
