import json
import os
import subprocess
import sys

import numpy as np
import pytest

from seqlab.reporting.results import find_results, labels, markdown, read_results, versions, write_results
from seqlab.reporting.tuning import tuned, untuned


def results(**changes):
    """The results of two members."""
    return {
        "status": "finished",
        "command": "python -m seqlab.run model=ssm",
        "config": {"model": {"width": 64}},
        "versions": versions(),
        "device": "cpu",
        "members": [
            {
                "seed": seed,
                "learning_rate": 1e-3,
                "status": "finished",
                "metrics": {"accuracy": np.float32(accuracy)},
                "validation": accuracy,
                "solved_at": None,
            }
            for seed, accuracy in enumerate((0.5, 0.75))
        ],
        "tuning": tuned(untuned("accuracy", True, [1e-3]), [[0.5, 0.75]]),
        "match": None,
        "measures": {
            "recall": {"axes": {"gap": (1, 2, 4)}, "values": np.array([[1.0, 0.5, 0.25], [1.0, np.nan, np.inf]])},
            "perplexity": {"axes": {}, "values": np.array([2.0, 3.0])},
        },
        "ceilings": {"chance": 0.125},
        "controls": {"future": {"expected": "zero", "value": 0.0, "holds": np.bool_(True)}},
        "cost": {"parameters": 1000, "state_bytes": np.int64(256)},
    } | changes


def test_numpy_becomes_plain_and_what_json_lacks_becomes_null(tmp_path):
    write_results(tmp_path, results())

    def refuse(constant):
        raise AssertionError(f"{constant} is no JSON")

    read = json.loads((tmp_path / "results.json").read_text(), parse_constant=refuse)
    assert read == read_results(tmp_path)
    assert read["members"][1]["metrics"] == {"accuracy": 0.75}  # a power of two, exact in float32
    assert read["measures"]["recall"] == {"axes": {"gap": [1, 2, 4]}, "values": [[1.0, 0.5, 0.25], [1.0, None, None]]}
    assert read["controls"]["future"]["holds"] is True
    assert read["cost"]["state_bytes"] == 256


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    write_results(tmp_path, results(device="old"))

    def killed(descriptor):
        raise OSError("no space left")

    monkeypatch.setattr(os, "fsync", killed)
    with pytest.raises(OSError, match="no space"):
        write_results(tmp_path, results(device="new"))
    assert read_results(tmp_path)["device"] == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["results.json"]


def test_others_may_read_what_the_umask_lets_them(tmp_path):
    write_results(tmp_path, results())
    (tmp_path / "plain").touch()
    assert (tmp_path / "results.json").stat().st_mode == (tmp_path / "plain").stat().st_mode


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"extra": 1}, "unknown: .'extra'."),
        ({"status": "done"}, "'done'; it must be one of finished"),
        ({"measures": {"recall": {"axes": {"gap": [1, 2]}, "values": [[1, 2, 3]] * 2}}}, r"\(2, 3\).* need \(2, 2\)"),
    ],
)
def test_what_breaks_the_schema_is_refused(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        write_results(tmp_path, results(**changes))
    assert not list(tmp_path.iterdir())


def test_missing_keys_are_refused(tmp_path):
    incomplete = results()
    del incomplete["cost"]
    with pytest.raises(ValueError, match=r"missing: .'cost'."):
        write_results(tmp_path, incomplete)


def test_runs_are_found_and_broken_ones_skipped_with_one_line_each(tmp_path, caplog):
    for name in ("ssm/default", "rnn/model.width=64"):
        (tmp_path / name).mkdir(parents=True)
        write_results(tmp_path / name, results(device=name))
    for name, text in (("cut", '{"status": "fin'), ("foreign", "[1]")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "results.json").write_text(text)
    found = find_results(tmp_path)
    assert [(name, run["device"]) for name, run in found] == [(n, n) for n in ("rnn/model.width=64", "ssm/default")]
    assert len(caplog.messages) == 2
    assert not any("\n" in message for message in caplog.messages)
    assert [name for name, _ in find_results(tmp_path / "ssm" / "default")] == ["default"]


def test_versions_name_what_is_installed():
    found = versions()
    assert found["numpy"] == np.__version__
    assert found["python"] == sys.version.split()[0]


def test_reading_results_loads_no_jax():
    command = (
        "import sys, seqlab.compare; sys.exit(any(m in sys.modules for m in ('jax', 'matplotlib', 'tensorboard')))"
    )
    assert subprocess.run([sys.executable, "-c", command], check=False).returncode == 0


@pytest.mark.parametrize(
    ("runs", "short"),
    [
        (["mqar/ssm/model.width=8,seed=1", "mqar/gru/model.width=8,seed=1"], ["ssm", "gru"]),
        (
            ["mqar/ssm/defaults", "mqar/ssm/population.learning_rates=[1,2]"],
            ["defaults", "learning_rates=[1,2]"],
        ),
        (["ssm/a.width=1", "ssm/b.width=1"], ["a.width=1", "b.width=1"]),  # else they have one name
        (["ssm/words=" + 60 * "x", "gru"], ["ssm words=" + 29 * "x" + "... 1", "gru"]),
        (
            ["ssm/seed=1", "ssm/seed=1,train.steps=9"],
            ["ssm/seed=1", "ssm/seed=1,train.steps=9"],
        ),  # else one has no name
        (["mqar/ssm/seed=1,train.steps=9"], ["mqar ssm"]),
        (["ssm/defaults", "gru/seed=1"], ["ssm", "gru seed=1"]),
        (["ssm", "gru"], ["ssm", "gru"]),
        ([""], [""]),
    ],
)
def test_runs_are_labelled_by_what_tells_them_apart(runs, short):
    assert labels(runs) == short


def test_the_text_panel_shows_the_grid_and_the_members_that_were_chosen_by_it():
    run = results()
    run["members"] = [member | {"learning_rate": rate} for rate in (1e-3, 3e-3) for member in run["members"]]
    run["measures"] = {"perplexity": {"axes": {}, "values": [2.0, 3.0, 8.0, 9.0]}}
    run["tuning"] = tuned(untuned("accuracy", True, [1e-3, 3e-3]), [[0.5, 0.75], [0.5, 0.25]])
    text = markdown(run)
    assert "| perplexity | 2.5 [2, 3] |" in text
    assert "| 0.001, chosen | 0.625 [0.5, 0.75] |" in text and "| 0.003 | 0.375 [0.25, 0.5] |" in text
    assert "tuned at the edge: widen the grid" in text
    assert "widen" not in markdown(results())
