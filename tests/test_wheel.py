"""The wheel: two packages, the recipes and the assets inside, and nothing else."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def wheel_files(tmp_path_factory) -> set[str]:
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", f"--outdir={folder}"]
    done = subprocess.run([*build, str(ROOT)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def files_under(folder: str) -> set[str]:
    paths = (ROOT / folder).rglob("*")
    found = {str(p.relative_to(ROOT)) for p in paths if p.is_file() and p.suffix != ".pyc"}
    assert found, f"{folder} is empty in the checkout"
    return found


def test_top_level_names_are_the_two_packages(wheel_files):
    names = {name.partition("/")[0] for name in wheel_files}
    (dist_info,) = {name for name in names if name.endswith(".dist-info")}
    assert names - {dist_info} == {"lightning_qrl", "callbacks"}


def test_recipes_stand_inside_the_package(wheel_files):
    recipes = files_under("recipes")
    assert any(name.endswith(".yaml") for name in recipes)
    assert {f"lightning_qrl/{name}" for name in recipes} <= wheel_files


def test_every_asset_is_carried(wheel_files):
    assets = files_under("lightning_qrl/assets")
    assert any(name.endswith(".safetensors") for name in assets)
    assert assets <= wheel_files


def test_the_page_of_a_comparison_has_its_template(wheel_files):
    page = "lightning_qrl/reports/page"
    assert {f"{page}/page.html.j2", f"{page}/page.css"} <= wheel_files


def test_both_packages_are_typed(wheel_files):
    assert {"lightning_qrl/py.typed", "callbacks/py.typed"} <= wheel_files


def test_no_source_file_is_left_behind(wheel_files):
    sources = files_under("lightning_qrl") | files_under("callbacks")
    assert {name for name in sources if name.endswith(".py")} <= wheel_files
