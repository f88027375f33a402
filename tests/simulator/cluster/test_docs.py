"""The documentation's table of keys and its example, against what a cluster takes."""

from pathlib import Path

from omegaconf import OmegaConf

from lightning_qrl.simulator.cluster import Cluster
from lightning_qrl.simulator.words import plain

DOCS = Path(__file__).parents[3] / "docs" / "simulator.md"
KEYS, END = "<!-- cluster keys -->", "<!-- end of cluster keys -->"
EXAMPLE = "<!-- cluster example -->"
OTHERWISE = {"lengths.values", "lengths.file"}  # in place of the other keys of lengths


def leaves(values, prefix=""):
    for key, value in values.items():
        if isinstance(value, dict):
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", plain(value)


def test_the_table_has_every_key_and_its_default():
    table = DOCS.read_text().split(KEYS)[1].split(END)[0]
    cells = [
        [cell.strip() for cell in line.replace("\\|", "/").strip("|").split("|")]
        for line in table.strip().splitlines()[2:]
    ]
    assert all(len(row) == 4 for row in cells)
    shown = {key.strip("`"): default.strip("`") for key, default, *_ in cells}
    assert len(shown) == len(cells)
    assert shown.keys() >= OTHERWISE
    own = {key: default for key, default in shown.items() if key not in OTHERWISE}
    assert own == dict(leaves(Cluster().to_mapping()))


def test_the_example_is_a_cluster():
    text = DOCS.read_text().split(EXAMPLE)[1].split("```yaml")[1].split("```")[0]
    cluster = Cluster.from_mapping(OmegaConf.to_container(OmegaConf.create(text)))
    assert len(cluster.samplers) == 2
    assert cluster.target_reward is not None
