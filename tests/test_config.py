"""Config files and flags."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from fedfac.config import Config, merged, read_toml
from fedfac.errors import ConfigError


def test_a_config_survives_the_way_through_plain_tables() -> None:
    config = Config.from_dict({"data": {"alpha": 1}, "method": {"name": "fedavg"}, "train": {"cohort": 3}})
    assert Config.from_dict(config.to_dict()) == config
    assert config.data.alpha == 1.0
    assert config.train.cohort == 3
    assert config.method_name == "fedavg"


@pytest.mark.parametrize(
    ("tables", "words"),
    [
        ({"trian": {}}, "unknown table [trian]. Did you mean 'train'?"),
        ({"train": {"round": 3}}, "unknown key 'round' in [train]. Did you mean 'rounds'"),
        ({"train": {"rounds": "many"}}, "rounds in [train] is 'many'; it must be of type int"),
        ({"train": {"rounds": True}}, "rounds in [train] is True; it must be of type int"),
        ({"data": 3}, "data is 3; it must be a table, [data]"),
    ],
)
def test_mistakes_are_named(tables: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Config.from_dict(tables)
    assert words in str(caught.value)


def test_flags_win_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "a.toml"
    file.write_text('[train]\nrounds = 9\nlr = 0.5\n[method]\nname = "fedavg"\n')
    tables = merged(read_toml(file), {"train": {"rounds": 4, "lr": None}, "data": {"clients": None}})
    assert tables == {"train": {"rounds": 4, "lr": 0.5}, "method": {"name": "fedavg"}}


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no config file"):
        read_toml(tmp_path / "none.toml")
    (tmp_path / "bad.toml").write_text("rounds = = 3")
    with pytest.raises(ConfigError, match=r"bad\.toml cannot be read"):
        read_toml(tmp_path / "bad.toml")


def test_toml_is_read_back_as_it_was() -> None:
    config = Config.from_dict(
        {
            "data": {"name": 'odd "name" \\ é\x7f\n.csv', "label": "y", "alpha": 1e-5},
            "model": {"name": "mlp", "hidden": 7},
            "method": {"name": "fedfac", "layers": [1, "fc1"], "tau": {"1": "50%", "fc1": float("inf")}},
            "train": {"rate": 0.5, "lr": 1e-3},
        }
    )
    assert Config.from_dict(tomllib.loads(config.to_toml())) == config
    assert Config.from_dict(tomllib.loads(Config().to_toml())) == Config()
