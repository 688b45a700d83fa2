"""The study of feature maps, in its quick form; agreement and roughness on maps whose answer is known."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from helpers import check_readable, message

from fedfac import experiment
from fedfac.errors import ModelError
from fedfac.models import build
from fedfac.studies import features, frame
from fedfac.studies.frame import Ask, Finding
from fedfac.studies.training import config, dirichlet

ASK = Ask(quick=True)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> tuple[Finding, Path]:
    return frame.run("features", ASK, tmp_path_factory.mktemp("studies"))


def test_maps_are_what_the_layer_hands_on() -> None:
    model = build("cnn", shape=(1, 8, 8), classes=10, seed=0).eval()
    image = torch.randn(2, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        first, second = model.get_submodule("conv1"), model.get_submodule("conv2")
        expected = torch.relu(second(torch.relu(first(image))))
    assert torch.equal(features.maps_of(model, "conv2", image), expected)
    said = message(ModelError, lambda: features.maps_of(model, "fc1", image))
    assert said == "layer 'fc1' hands on no maps (channels, height, width): choose a convolution"


def test_agreement_and_roughness() -> None:
    draws = torch.randn(50, 16, 16, generator=torch.Generator().manual_seed(0))
    smooth = torch.arange(16.0).expand(3, 16, 16)
    assert features.agreement(draws, 3 * draws + 1) == pytest.approx(1)
    assert features.agreement(draws, -draws) == pytest.approx(-1)
    assert features.agreement(draws, torch.ones_like(draws)) is None
    assert features.roughness(draws) == pytest.approx(1, abs=0.03)
    rough = features.roughness(smooth)
    assert rough is not None
    assert rough < 0.05


def test_the_picture_shows_the_maps(found: tuple[Finding, Path]) -> None:
    finding, folder = found
    figure = finding.figures["features"]()
    check_readable(figure)
    shown = [axes for axes in figure.axes if axes.get_label() != "<colorbar>"]
    assert len(shown) == 5
    (level,) = dirichlet(0.5)
    asked = {"name": "fedfac", "layers": ["conv2"], "tau": "50%"}
    ours = experiment.run(config(ASK, level, asked, 0))
    client = next(c for c in range(24) if ours.store.get(c) is not None)
    assert ours.federation is not None
    image, label = features.first_image(ours.federation, client)
    assert f"a {label} of one client" in shown[0].get_title()
    assert np.array_equal(np.asarray(shown[0].images[0].get_array()), image[0, 0].numpy())
    maps = features.maps_of(ours.model(client), "conv2", image)[0]
    rows = pq.read_table(folder / "maps.parquet").to_pylist()
    mask = ours.split.masks["conv2"]
    for row in rows:
        assert (row["kind"] == "shared") == mask[row["channel"]]
        if row["method"] == "FedFac":
            assert torch.allclose(torch.tensor(row["map"]), maps[row["channel"]])
    strip = np.asarray(shown[1].images[0].get_array())
    first = next(row for row in rows if (row["kind"], row["method"]) == ("personal", "FedFac"))
    assert np.allclose(strip[:, :8], np.array(first["map"], dtype=np.float32))
    assert shown[1].get_xticklabels()[0].get_text() == str(first["channel"])
    check_readable(finding.figures["channels"]())


def test_numbers_and_words(found: tuple[Finding, Path]) -> None:
    finding, folder = found
    channels = pq.read_table(folder / "channels.parquet").to_pylist()
    personal, shared = finding.summary["groups"]
    assert (personal["channels"], shared["channels"]) == (16, 16)
    own = [row["agreement"] for row in channels if row["kind"] == "shared" and row["agreement"] is not None]
    assert shared["agreement"] == pytest.approx(sum(own) / len(own))
    page = (folder / "page.md").read_text()
    holds = "holds." if shared["agreement"] > personal["agreement"] else "does not hold."
    assert f"personal ones by {personal['agreement']:.3f}; here that {holds}" in page
    turned = [{**personal, "agreement": 0.9}, {**shared, "agreement": 0.1}]
    assert "personal ones by 0.900; here that does not hold." in features.page(ASK, "0", 3, turned)
