"""The study of ablation, in its quick form; what masking does, element by element."""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from helpers import check_readable, heights, message
from torch import nn

from fedfac import experiment
from fedfac.anatomy import Anatomy
from fedfac.errors import ConfigError
from fedfac.split import Split
from fedfac.state import state_of
from fedfac.studies import ablation, frame
from fedfac.studies.frame import Ask, Finding, Row
from fedfac.studies.training import config, dirichlet

ASK = Ask(quick=True)
NET = nn.Sequential(nn.Conv1d(1, 4, 2), nn.BatchNorm1d(4), nn.Flatten(), nn.Linear(12, 2))


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> tuple[Finding, Path]:
    return frame.run("ablation", ASK, tmp_path_factory.mktemp("studies"))


def small_split() -> Split:
    anatomy = Anatomy.of(NET)
    return Split.of(anatomy, layers=anatomy.select([1])).with_masks({"0": (True, False, False, True)})


def test_only_the_group_is_replaced() -> None:
    state = {name: torch.ones_like(t, dtype=torch.float32) for name, t in state_of(NET).items()}
    fresh = {name: torch.full_like(t, 7) for name, t in state.items()}
    kept = {"nothing": [1, 1, 1, 1], "shared": [7, 1, 1, 7], "personal": [1, 7, 7, 1]}
    for group, expected in kept.items():
        made = ablation.replaced(state, ablation.elements(small_split(), group), fresh)
        for name in ("0.weight", "0.bias", "1.weight", "1.bias", "1.running_mean"):  # an element's norm goes with it
            assert made[name].reshape(4, -1)[:, 0].tolist() == expected, (group, name)
        assert torch.equal(made["3.weight"], state["3.weight"])
    random = ablation.elements(small_split(), "random half", draw=1).masks["0"]
    assert sum(random) == 2
    assert random == ablation.elements(small_split(), "random half", draw=1).masks["0"]
    said = message(ConfigError, lambda: ablation.elements(small_split(), "both"))
    assert said == "there is no group 'both' to mask; there are nothing, shared, personal, random half"


def test_masking_nothing_changes_nothing(found: tuple[Finding, Path]) -> None:
    (level, _) = dirichlet(0.1, 1.0)
    asked = config(ASK, level, {"name": "fedfac", "layers": ["fc1"], "tau": "50%"}, 0)
    result = experiment.run(asked)
    fresh = state_of(experiment.build(config(ASK, level, asked.method, 1000))[0])
    rows = {row["masked"]: row["accuracy"] for row in found[0].tables["masked"] if row["level"] == "Dir(0.1)"}
    assert rows["nothing"] == pytest.approx(result.accuracy)
    chosen = ablation.elements(result.split, "personal")
    assert rows["personal"] == ablation.accuracy(result, chosen, fresh)
    assert rows["personal"] < rows["nothing"]
    # masked every round: nothing masked is the run itself, and a masked run is another one
    assert ablation.masked_every_round(ASK, asked, "nothing", fresh).records == result.records
    assert rows["personal, every round"] != rows["personal"]


def test_tables_figures_and_words(found: tuple[Finding, Path]) -> None:
    finding, folder = found
    masked = pq.read_table(folder / "masked.parquet").to_pylist()
    splits = pq.read_table(folder / "splits.parquet").to_pylist()
    assert {row["masked"] for row in masked} == set(ablation.MASKS)
    assert {row["split"] for row in splits} == set(ablation.SPLITS)
    for name, rows in (("masked", masked), ("splits", splits)):
        figure = finding.figures[name]()
        check_readable(figure)
        drawn = sorted(height for axes in figure.axes for height in heights(axes))
        assert drawn == pytest.approx(sorted(row["accuracy"] for row in rows))  # one seed: a bar a row
    wide = ablation._wide(ablation.means(masked, "masked"), "masked", ablation.MASKS)
    worse = sum(row["personal"] < row["shared"] for row in wide)
    assert f"in **{worse} of {len(wide)}** settings" in (folder / "page.md").read_text()


def test_the_words_can_disagree_with_the_paper() -> None:
    def rows(key: str, values: dict[str, float]) -> list[Row]:
        return [{"level": "a", "layer": "fc1", "seed": 0, key: name, "accuracy": v} for name, v in values.items()]

    masks = dict.fromkeys(ablation.MASKS, 0.5) | {"personal": 0.6, "personal, every round": 0.4}
    said = ablation._said_masked(ablation.means(rows("masked", masks), "masked"))
    assert "in **0 of 1** settings (by -0.100 in the mean) when models are masked after training" in said
    assert "in **1 of 1** settings (by +0.100 in the mean) when they are masked every round" in said
    scores = {"fedfac": 0.5, "fedfac-static": 0.7, "random": 0.6, "random-redrawn": 0.4}
    said = ablation._said_splits(ablation.means(rows("split", scores), "split"))
    assert "redrawn every round in **1 of 1** settings (by +0.100" in said
    assert "drawn once in **0 of 1** settings (by -0.100" in said
    spread = ablation.means(rows("split", scores) + rows("split", {"fedfac": 0.7}), "split")
    assert spread[0]["accuracy"] == pytest.approx(0.6)
    assert spread[0]["std"] == pytest.approx(0.1 * 2**0.5)
