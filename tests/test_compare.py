"""Comparisons: a fair grid, resumable, honest about what failed, and the figures in its tables."""

from __future__ import annotations

import csv
import io
import json
import re
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from fedfac import comparison, experiment, tables
from fedfac.cli import main
from fedfac.comparison import Cell, Comparison
from fedfac.errors import ConfigError, RunError
from fedfac.report import facts as report_facts
from fedfac.run import RunDirectory
from fedfac.state import references, same

TABLES: dict[str, Any] = {
    "data": {"clients": 8},
    "train": {"rounds": 3, "cohort": 4, "epochs": 1, "batch_size": 16},
    "method": {"layers": [3]},
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Comparison:
    out = tmp_path_factory.mktemp("compare") / "grid"
    planned = comparison.plan(
        out,
        methods=["fedavg", "fedper", "fedfac:tau=75%"],
        tables=TABLES,
        seeds=[0, 4],
        vary={"alpha": [0.1, 10.0]},
        time_rounds=2,
    )
    assert comparison.train(planned) == {}
    return planned


def test_the_grid_is_methods_by_settings_by_seeds(trained: Comparison) -> None:
    assert len(trained.cells) == 3 * 2 * 2
    assert trained.settings == ["alpha=0.1", "alpha=10.0"]
    assert trained.methods == ["fedavg", "fedper", "fedfac:tau=75%"]
    assert {cell.config.data.alpha for cell in trained.of("alpha=10.0", "fedper")} == {10.0}
    assert [cell.seed for cell in trained.of("alpha=0.1", "fedavg")] == [0, 4]
    assert trained.of("alpha=0.1", "fedfac:tau=75%")[0].config.method_options == {"layers": [3], "tau": "75%"}
    assert trained.of("alpha=0.1", "fedavg")[0].config.method_options == {}
    assert all(comparison.is_finished(cell) for cell in trained.cells)


def test_all_methods_of_a_seed_have_the_same_partition_start_and_cohorts(trained: Comparison) -> None:
    for setting in trained.settings:
        for seed in (0, 4):
            cells = [c for c in trained.cells if (c.setting, c.seed) == (setting, seed)]
            built = [experiment.build(cell.config) for cell in cells]
            assert len({federation.fingerprint for _, federation, _ in built}) == 1
            assert all(same(references(model), references(built[0][0])) for model, _, _ in built)
            cohorts = [[r["cohort"] for r in RunDirectory.read(c.folder).records() if r["round"]] for c in cells]
            assert all(cohort == cohorts[0] for cohort in cohorts)
    seeds = trained.of("alpha=0.1", "fedavg")
    assert len({experiment.build(cell.config)[1].fingerprint for cell in seeds}) == 2


def test_going_on_trains_only_what_is_missing(trained: Comparison) -> None:
    stamps = {cell.folder: (cell.folder / "state.sqlite").stat().st_mtime_ns for cell in trained.cells}
    again = comparison.plan(
        trained.out,
        methods=trained.methods,
        tables=TABLES,
        seeds=[0, 4],
        vary={"alpha": [0.1, 10.0]},
        time_rounds=2,
    )
    assert comparison.train(again) == {}
    assert comparison.load(trained.out) == trained
    assert {cell.folder: (cell.folder / "state.sqlite").stat().st_mtime_ns for cell in trained.cells} == stamps


def test_a_cell_that_another_process_finishes_meanwhile_gets_no_further_round(tmp_path: Path) -> None:
    planned = comparison.plan(
        tmp_path / "c",
        methods=["fedavg", "fedper"],
        tables={"data": {"clients": 6}, "train": {"rounds": 2, "cohort": 3, "epochs": 1}},
    )
    first, second = planned.cells

    def faster(cells: Sequence[Cell]) -> None:
        if first in cells:
            experiment.session(second.config, out=second.folder, lanes=1).drive()

    assert comparison.train(planned, lanes=1, on_cells=faster) == {}
    assert [comparison.rounds_done(cell) for cell in planned.cells] == [2, 2]


def test_another_comparison_in_the_same_folder_is_refused(trained: Comparison) -> None:
    with pytest.raises(RunError, match=r"vary.alpha was \[0.1, 10.0\], now \[0.1\]"):
        comparison.plan(trained.out, methods=trained.methods, tables=TABLES, seeds=[0, 4], vary={"alpha": [0.1]})


def test_the_tables_hold_means_and_deviations_over_seeds(trained: Comparison) -> None:
    block = tables.blocks(trained)[0]
    for method in trained.methods:
        curves = []
        for cell in trained.of("alpha=0.1", method):
            records = RunDirectory.read(cell.folder).records()
            curves.append([r["test"]["accuracy"] for r in records if "test" in r])
        lasts = [statistics.fmean(curve) for curve in curves]  # three rounds: fewer than ten
        entry = block.rows[method]["last"]
        assert entry.mean == pytest.approx(statistics.fmean(lasts))
        assert entry.spread == pytest.approx(statistics.stdev(lasts))
    best = max(trained.methods, key=lambda m: block.rows[m]["last"].mean)
    assert [m for m in trained.methods if block.rows[m]["last"].best] == [best]
    lowest = min(trained.methods, key=lambda m: block.rows[m]["std"].mean)
    assert block.rows[lowest]["std"].best
    assert block.models == {"fedavg": "global", "fedper": "personal", "fedfac:tau=75%": "personal"}


def test_every_table_says_what_its_headline_is_the_mean_of(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["compare", "--clients", "6", "--cohort", "2", "--epochs", "1", "--methods", "fedavg,fedper", "--quiet"]
    asked += ["--rounds", "14", "--evaluate-every", "4", "--time-rounds", "0", "--out", str(tmp_path / "c")]
    assert main(asked) == 0
    said = "last 10: the mean of 3 evaluations of rounds 8-14"
    assert said in " ".join(capsys.readouterr().out.split())
    assert said in (tmp_path / "c" / "table.md").read_text()
    assert said in (tmp_path / "c" / "table.tex").read_text()
    assert said in report_facts.gather([tmp_path / "c"])["note"]
    planned = comparison.load(tmp_path / "c")
    assert main(["resume", str(tmp_path / "c"), "--json", "--quiet"]) == 0
    shown = json.loads(capsys.readouterr().out)["settings"][0]["methods"]
    rows = list(csv.DictReader(io.StringIO(tables.csv_text(planned))))
    for cell, row in zip(planned.cells, rows, strict=True):
        curve = {r["round"]: r["test"]["accuracy"] for r in RunDirectory.read(cell.folder).records() if "test" in r}
        mean = pytest.approx(statistics.fmean(curve[number] for number in (8, 12, 14)))
        assert shown[cell.method]["last"]["mean"] == mean == float(row["last"])
        assert (shown[cell.method]["evaluations"], shown[cell.method]["window"]) == (3, [8, 14])
        assert (row["evaluations"], row["window"]) == ("3", "8-14")


def test_csv_markdown_and_latex_say_the_same(trained: Comparison) -> None:
    rows = list(csv.DictReader(io.StringIO(tables.csv_text(trained))))
    assert len(rows) == 12
    assert {row["model"] for row in rows if row["method"] == "fedavg"} == {"global"}
    blocks = tables.blocks(trained)
    best = next(m for m in trained.methods if blocks[0].rows[m]["last"].best)
    number = f"{blocks[0].rows[best]['last'].mean:.3f}"
    assert f"| {best} |" in tables.markdown(blocks)
    assert f"**{number} ± " in tables.markdown(blocks)
    assert f"\\textbf{{{number} $\\pm$ " in tables.latex(blocks)
    assert "fedfac:tau=75\\%" in tables.latex(blocks)
    assert tables.latex(blocks).count("\\begin{tabular}") == 2
    assert json.loads(json.dumps(tables.plain(blocks)))[1]["setting"] == "alpha=10.0"


def test_times_are_relative_to_fedavg_and_taken_once(trained: Comparison) -> None:
    ratios = comparison.take_times(trained)
    assert ratios.keys() == set(trained.methods)
    assert ratios["fedavg"] == 1.0
    assert all(0 < ratio < 100 for ratio in ratios.values())
    assert comparison.take_times(trained) == ratios
    assert tables.blocks(trained, ratios)[0].rows["fedavg"]["time"].mean == 1.0
    assert "time" in tables.markdown(tables.blocks(trained, ratios))


def test_static_methods_can_be_timed(tmp_path: Path) -> None:
    planned = comparison.plan(tmp_path / "c", methods=["fedavg", "fedfac-static"], tables=TABLES, time_rounds=1)
    assert comparison.take_times(planned).keys() == {"fedavg", "fedfac-static"}


def test_a_crashed_cell_is_reported_and_the_rest_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    base = [
        "compare",
        "--clients",
        "8",
        "--rounds",
        "2",
        "--cohort",
        "4",
        "--epochs",
        "1",
        "--out",
        "c",
        "--json",
        "--time-rounds",
        "1",
    ]
    methods = ["--methods", "fedavg,fedper,local", "--quiet"]
    # fedper's folder is taken by something that is no run: that cell can only fail
    planned = comparison.plan(
        Path("c"),
        methods=["fedavg", "fedper", "local"],
        tables={"data": {"clients": 8}, "train": {"rounds": 2, "cohort": 4, "epochs": 1}},
        time_rounds=1,
    )
    taken = planned.of("", "fedper")[0].folder
    taken.mkdir()
    (taken / "notes.txt").write_text("mine")
    assert main([*base, *methods]) == 1
    said = json.loads(capsys.readouterr().out)
    assert said["failed"].keys() == {str(taken)}
    assert "is not empty" in said["failed"][str(taken)]
    assert said["settings"][0]["methods"].keys() == {"fedavg", "local"}
    assert (taken / "notes.txt").read_text() == "mine"
    for file in taken.iterdir():
        file.unlink()
    assert main([*base, *methods]) == 0
    assert json.loads(capsys.readouterr().out)["settings"][0]["methods"].keys() == {"fedavg", "fedper", "local"}


def test_a_comparison_of_which_every_cell_fails_prints_reasons_and_no_empty_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["compare", "--clients", "8", "--cohort", "9", "--rounds", "1", "--methods", "fedavg,fedper", "--quiet"]
    assert main([*asked, "--out", str(tmp_path / "c")]) == 1
    said = capsys.readouterr()
    assert said.out.startswith("the comparison: nothing has been evaluated yet\nin ")
    assert said.err.count("failed: ") == said.err.count("a cohort of 9 clients was asked for") == 1  # one reason
    assert f"{tmp_path / 'c' / 'fedavg'}, {tmp_path / 'c' / 'fedper'}: " in said.err


def test_a_file_can_describe_a_comparison(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("grid.toml").write_text(
        "[data]\nclients = 8\n[train]\nrounds = 2\ncohort = 4\nepochs = 1\nnewcomers = 0.25\n"
        '[method]\nlayers = ["fc1"]\n'
        '[compare]\nmethods = ["fedavg", "fedfac"]\nseeds = [0, 1]\ntime_rounds = 1\n'
    )
    assert main(["compare", "--config", "grid.toml", "--out", "g"]) == 0
    out = capsys.readouterr().out
    assert "fedfac" in out
    assert "time" in out
    planned = comparison.load(Path("g"))
    cells = list(csv.DictReader(io.StringIO((Path("g") / "results.csv").read_text())))
    for cell, row in zip(planned.cells, cells, strict=True):
        (found,) = [r["newcomers"]["adapt"] for r in RunDirectory.read(cell.folder).records() if "newcomers" in r]
        assert float(row["newcomers_accuracy"]) == found["accuracy"]
        assert float(row["newcomers_worst_decile"]) == found["worst_decile"]
    means = {
        method: f"{statistics.fmean(float(r['newcomers_accuracy']) for r in cells if r['method'] == method):.3f}"
        for method in planned.methods
    }
    (block,) = tables.blocks(planned)
    assert {method: f"{row['newcomers_accuracy'].mean:.3f}" for method, row in block.rows.items()} == means
    for text in (out, (Path("g") / "table.md").read_text(), (Path("g") / "table.tex").read_text()):
        head = next(line for line in text.splitlines() if "worst decile" in line)
        assert head.index("Jain") < head.index("newcomers") < head.index("time")
        for method, mean in means.items():
            assert mean in next(line for line in text.splitlines() if re.search(rf"{method}\W+(global|personal)", line))
    assert "newcomers: over all test samples of the clients that were kept out" in (Path("g") / "table.md").read_text()
    (table,) = report_facts.gather([Path("g")])["tables"]
    shown = table["columns"].index("newcomers")
    assert [row["cells"][shown]["text"][:5] for row in table["rows"]] == list(means.values())
    assert main(["newcomers", "g", "--lanes", "1", "--device", "cpu", "--json", "--quiet"]) == 0
    rows = json.loads(capsys.readouterr().out)["newcomers"]
    adapted = [figures for row in rows if row["rule"] == "adapt" for figures in row["runs"]]
    assert [figures["accuracy"] for figures in adapted] == [float(row["newcomers_accuracy"]) for row in cells]
    assert main(["newcomers", "g", "--epochs", "1", "--json", "--quiet"]) == 0
    rows = json.loads(capsys.readouterr().out)["newcomers"]
    assert [(row["method"], row["rule"]) for row in rows] == [
        ("fedavg", "adapt"),
        ("fedfac", "adapt"),
        ("fedfac", "ensemble"),
    ]
    assert all(len(row["runs"]) == 2 and row["runs"][0]["clients"] == 2 for row in rows)
    assert main(["newcomers", "g", "--rule", "ensemble", "--json", "--quiet"]) == 0
    assert json.loads(capsys.readouterr().out)["newcomers"] == rows[2:]
    assert main(["newcomers", "g/fedavg/seed-0", "--rule", "ensemble"]) == 1
    assert "--rule is ensemble; no method here serves newcomers by it: leave it out" in capsys.readouterr().err
    assert main(["newcomers", "g/fedfac/seed-0"]) == 0
    assert "ensemble" in capsys.readouterr().out
    assert main(["run", "--config", "grid.toml", "--out", "r", "--quiet"]) == 0
    last = RunDirectory.read(Path("r")).records()[-1]["newcomers"]
    figures = last["adapt"]
    line = (
        f"newcomers: 2 clients, adapted model, accuracy {figures['accuracy']:.3f}, "
        f"worst decile {figures['worst_decile']:.3f}"
    )
    assert line in capsys.readouterr().out
    assert main(["inspect", "r"]) == 0
    assert line in capsys.readouterr().out
    assert main(["resume", "r", "--json", "--quiet"]) == 0  # it is finished: the figures are those of its last round
    assert json.loads(capsys.readouterr().out)["newcomers"] == last


def write_grid(method: str, *, time_rounds: int) -> None:
    Path("grid.toml").write_text(
        f"[data]\nclients = 4\n[train]\nrounds = 1\ncohort = 2\nepochs = 1\n[method]\n{method}\n"
        f'[compare]\nmethods = ["fedavg", "fedfac"]\ntime_rounds = {time_rounds}\n'
    )


def test_a_file_serves_other_methods_than_it_lists(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_grid('layers = ["fc1"]\nserver_rate = 0.5', time_rounds=0)
    few = ["compare", "--config", "grid.toml", "--methods", "fedavg,fedper", "--quiet", "--out"]
    assert main([*few, "g"]) == 0
    assert [c.config.method_options for c in comparison.load(Path("g")).cells] == [{"server_rate": 0.5}] * 2
    capsys.readouterr()
    assert main([*few, "flag", "--layers", "fc1"]) == 1
    assert "none of the methods has an option 'layers'" in capsys.readouterr().err
    Path("grid.toml").write_text(Path("grid.toml").read_text().replace("layers", "lairs"))
    assert main([*few, "typo"]) == 1
    assert "none of the methods has an option 'lairs'" in capsys.readouterr().err


def test_methods_can_be_added_to_a_comparison(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_grid('layers = ["fc1"]', time_rounds=1)
    start = ["compare", "--config", "grid.toml", "--out", "g", "--quiet", "--methods"]
    assert main([*start, "fedavg,fedper"]) == 0
    before = Path("g/fedavg/state.sqlite").stat().st_mtime_ns
    assert main([*start, "fedfac"]) == 0  # it has the file's layers, which the others do not need
    found = comparison.load(Path("g"))
    assert found.methods == ["fedavg", "fedper", "fedfac"]
    assert found.cells[2].config.method_options == {"layers": ["fc1"]}
    assert Path("g/fedavg/state.sqlite").stat().st_mtime_ns == before
    assert comparison.times(found).keys() == set(found.methods)
    assert Path("g/results.csv").read_text().count("\n") == 4
    assert main([*start, "fedavg"]) == 0  # none is lost
    assert comparison.load(Path("g")) == found
    capsys.readouterr()
    assert main([*start, "local", "--lr", "0.1"]) == 1
    assert "g holds another run: tables.train.lr was None, now 0.1." in capsys.readouterr().err
    assert main([*start, "local", "--time-rounds", "2"]) == 1
    assert "g holds another run: time_rounds was 1, now 2" in capsys.readouterr().err
    assert comparison.load(Path("g")) == found
    assert main([*start, "local,local"]) == 1
    assert "each once" in capsys.readouterr().err


def test_seeds_can_be_added_to_a_comparison(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_grid('layers = ["fc1"]', time_rounds=0)
    start = ["compare", "--config", "grid.toml", "--quiet", "--out"]
    assert main([*start, "g"]) == 0
    stamp = Path("g/fedfac/state.sqlite").stat().st_mtime_ns
    assert main([*start, "g", "--seeds", "2"]) == 0  # as many, from 0 on
    assert main([*start, "g", "--seed", "7"]) == 0
    found = comparison.load(Path("g"))
    assert [(cell.method, cell.seed, str(cell.folder)) for cell in found.cells] == [
        ("fedavg", 0, "g/fedavg"),
        ("fedavg", 1, "g/fedavg.seed-1"),
        ("fedavg", 7, "g/fedavg.seed-7"),
        ("fedfac", 0, "g/fedfac"),
        ("fedfac", 1, "g/fedfac.seed-1"),
        ("fedfac", 7, "g/fedfac.seed-7"),
    ]
    assert all(comparison.is_finished(cell) for cell in found.cells)
    assert Path("g/fedfac/state.sqlite").stat().st_mtime_ns == stamp
    # each is the run that it would have been in a comparison of all seeds
    assert main([*start, "all", "--seeds", "0,1,7"]) == 0
    assert Path("g/results.csv").read_text() == Path("all/results.csv").read_text()
    assert main([*start, "all", "--methods", "local"]) == 0  # a new method has all seeds that are there
    assert str(comparison.load(Path("all")).of("", "local")[2].folder) == "all/local/seed-7"
    plan = json.loads(Path("g/comparison.json").read_text())
    del plan["alone"]  # as an earlier version wrote it
    plan["seeds"] = [0]
    Path("g/comparison.json").write_text(json.dumps(plan))
    assert [str(cell.folder) for cell in comparison.load(Path("g")).cells] == ["g/fedavg", "g/fedfac"]


def test_seed_and_seeds_say_which_seeds_are_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_grid('layers = ["fc1"]', time_rounds=0)
    with Path("grid.toml").open("a") as file:
        file.write("seeds = [0, 1]\n")
    start = ["compare", "--config", "grid.toml", "--methods", "fedavg", "--quiet", "--out"]
    for number, (flags, seeds) in enumerate(
        [([], [0, 1]), (["--seed", "4"], [4]), (["--seed", "4", "--seeds", "2"], [4, 5]), (["--seeds", "3,"], [3])]
    ):
        assert main([*start, str(number), *flags]) == 0
        assert [cell.seed for cell in comparison.load(Path(str(number))).cells] == seeds
    for flags, said in (
        (["--seed", "4", "--seeds", "1,2"], "--seeds 1,2 lists the seeds; leave out --seed 4"),
        (["--seeds", "0"], "--seeds is '0'; give a number of seeds, or a list of them: 0,1,2"),
        (["--seeds", "two"], "--seeds is 'two'; give a number of seeds"),
        (["--seeds", ","], "--seeds is ','; give a number of seeds"),
    ):
        capsys.readouterr()
        assert main([*start, "bad", *flags]) == 1
        assert said in capsys.readouterr().err
    assert not Path("bad").exists()


def test_newcomers_of_a_run_in_tf32_can_be_served_where_there_is_no_gpu(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "r"
    flags = ["--clients", "6", "--rounds", "1", "--epochs", "1", "--newcomers", "0.4", "--device", "cpu", "--quiet"]
    assert main(["run", *flags, "--json", "--out", str(out)]) == 0
    found = json.loads(capsys.readouterr().out)["newcomers"]["adapt"]
    config = json.loads((out / "config.json").read_text())
    config["origin"]["train"]["precision"] = "tf32"  # as if it had been trained on one
    (out / "config.json").write_text(json.dumps(config))
    assert main(["newcomers", str(out), "--device", "cpu", "--json", "--quiet"]) == 0
    assert json.loads(capsys.readouterr().out)["newcomers"][0]["runs"] == [found]


def test_without_newcomers_no_table_speaks_of_them(trained: Comparison) -> None:
    blocks = tables.blocks(trained)
    for text in (tables.csv_text(trained), tables.markdown(blocks), tables.latex(blocks)):
        assert "newcomers" not in text


def test_validation_samples_have_a_column_to_choose_by(tmp_path: Path) -> None:
    asked = {
        "data": {"name": "digits", "clients": 6, "validation_share": 0.25},
        "train": {"rounds": 3, "epochs": 1, "evaluate_every": 1},
    }
    planned = comparison.plan(tmp_path / "c", methods=["fedavg", "fedper"], tables=asked)
    assert comparison.train(planned) == {}
    (block,) = tables.blocks(planned)
    for cell in planned.cells:
        lines = (cell.folder / "metrics.jsonl").read_text().splitlines()
        held = [json.loads(line)["validation"]["accuracy"] for line in lines]
        assert block.rows[cell.method]["validation"].mean == pytest.approx(statistics.fmean(held))
    assert "| validation |" in tables.markdown([block])
    assert "the ones to choose by" in tables.markdown([block])
    assert ",validation" in tables.csv_text(planned).splitlines()[0]


def test_real_targets_of_newcomers_are_in_the_table_by_their_loss(tmp_path: Path) -> None:
    rows = [f"{client},{x},{2 * x + client + 0.5}" for client in range(6) for x in range(12)]
    (tmp_path / "data.csv").write_text("\n".join(["who,x,y", *rows]) + "\n")
    asked = {
        "data": {"name": str(tmp_path / "data.csv"), "label": "y", "client": "who"},
        "train": {"rounds": 1, "epochs": 1, "newcomers": 0.4},
    }
    planned = comparison.plan(tmp_path / "c", methods=["fedavg", "fedper"], tables=asked)
    assert comparison.train(planned) == {}
    (block,) = tables.blocks(planned)
    means = {method: row["newcomers_loss"].mean for method, row in block.rows.items()}
    (best,) = [method for method, row in block.rows.items() if row["newcomers_loss"].best]
    assert means[best] == min(means.values())
    assert "newcomers' loss" in tables.markdown([block])
    assert "Accuracy" not in tables.markdown([block])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            {"methods": ["fedprox:nu=1"]},
            "method 'fedprox' has no option 'nu'. Known: ",
        ),
        ({"methods": ["fedprox:mu"]}, "'mu' in 'fedprox:mu' is not an option"),
        ({"methods": ["fedprox:mu=x"]}, "mu of 'fedprox' is 'x'; it is a number"),
        ({"methods": ["fedper:warmup=a"]}, "warmup of 'fedper' is 'a'; it is a whole number"),
        ({"methods": ["fedfac:joint=maybe"]}, "joint of 'fedfac' is 'maybe'; it is true or false"),
        ({"methods": ["fedper:warmup=1:warmup=2"]}, "'fedper:warmup=1:warmup=2' gives warmup twice; give it once"),
        (
            {"methods": ["fedper:refresh_epochs=3"]},
            "no option 'refresh_epochs'. It is called 'refresh' since version 0.2",
        ),
        ({"methods": ["fedfac:layers=--1"]}, "layers of 'fedfac' is '--1'; it is layers by number or name"),
        ({"methods": ["fedfac:mu=0.1"]}, "no option 'mu'. It is called 'proximal' since version 0.2"),
        ({"methods": []}, "give at least one method"),
        ({"methods": ["fedavg"], "seeds": []}, "give at least one seed"),
        ({"methods": ["fedavg"], "vary": {"alhpa": [1]}}, "nothing called 'alhpa' to vary. Did you mean 'alpha'?"),
        ({"methods": ["fedavg"], "vary": {"seed": [1]}}, "seeds are given by seeds"),
    ],
)
def test_mistakes_are_explained_before_anything_is_written(
    tmp_path: Path, arguments: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        comparison.plan(tmp_path / "c", tables={}, **arguments)
    assert words in str(caught.value)
    assert not (tmp_path / "c").exists()


def test_newcomers_of_a_run_that_held_nobody_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    main(["run", "--clients", "6", "--rounds", "1", "--epochs", "1", "--out", "r", "--quiet"])
    assert main(["newcomers", "r"]) == 1
    assert "train with newcomers=0.1 (--newcomers 0.1)" in capsys.readouterr().err
    assert main(["newcomers", "r", "--epochs", "0"]) == 1
    assert "--epochs is 0" in capsys.readouterr().err
