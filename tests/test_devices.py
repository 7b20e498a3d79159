"""The check of a machine says what works, says why what does not does not, and goes on."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from seqlab import devices

ROOT = Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def _optimizations_stay_on():
    yield
    jax.config.update("jax_disable_most_optimizations", False)


def test_all_is_well_here(capsys):
    assert devices.report(devices.machine()) == 0
    said = capsys.readouterr().out
    assert sum(" ok " in line for line in said.splitlines()) == len(devices.machine()) == 6
    assert "cpu: 1 x cpu" in said
    assert "one device, no mesh" in said
    assert "GFLOP/s" in said
    assert "all 6 ok" in said


def test_one_failure_has_its_cause_and_stops_nothing(capsys):
    def broken():
        raise RuntimeError("no such luck\nand more")

    assert devices.report({"first": broken, "second": lambda: "fine"}) == 1
    said = capsys.readouterr().out
    assert "FAILED" in said and "RuntimeError: no such luck" in said and "and more" not in said
    assert "fine" in said
    assert "1 of 2 FAILED" in said


def test_a_wrong_product_is_found(monkeypatch):
    right = jax.numpy.matmul
    monkeypatch.setattr(jax.numpy, "matmul", lambda a, b, **more: right(a, b, **more).at[3, 5].add(1))
    with pytest.raises(ArithmeticError, match="off by"):
        devices.matmul("float32", 64)


def test_what_is_no_number_is_off():
    with pytest.raises(ArithmeticError, match="off by nan"):
        devices._agrees(np.array([np.nan, 1.0]), np.ones(2), 1.0)


def test_a_model_trains_two_steps_and_one_that_diverges_is_found(monkeypatch):
    with jax.numpy_dtype_promotion("standard"):
        said = devices.train("gru")
        assert said.startswith("loss ") and ", then " in said
        monkeypatch.setattr(devices, "TINY", [*devices.TINY, "optimizer.learning_rate=1e38"])
        with pytest.raises(FloatingPointError, match="a loss of"):
            devices.train("gru")


@pytest.mark.slow
def test_the_command_trains_models_and_spreads_them_over_the_devices():
    """Three of them: with all it takes two minutes, and tests/test_configs.py trains each."""
    env = os.environ | {
        "PYTHONPATH": str(ROOT),
        "JAX_COMPILATION_CACHE_DIR": jax.config.jax_compilation_cache_dir,
        "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
        "COLUMNS": "160",
    }
    models = ["gru", "hybrid", "transformer"]
    words = [sys.executable, "-m", "seqlab.devices", *models]
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert all(f"train {model} " in done.stdout for model in models)
    assert "population 1 x data 2 x model 1" in done.stdout
    assert sum(" ok " in line for line in done.stdout.splitlines()) == len(models) + 6


def test_an_unknown_model_is_refused(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["seqlab.devices", "gruu"])
    with pytest.raises(SystemExit) as stop:
        devices.main()
    assert stop.value.code == 2
    assert "gruu is unknown; use attention, " in capsys.readouterr().err
