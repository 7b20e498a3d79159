"""Every file in conf/ trains two steps: its constructors take what it says, and loss and gradient are finite."""

import shutil
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hydra.utils import instantiate

from seqlab.commandline import GROUPS
from seqlab.run import build, schedule

CONF = Path(__file__).parents[1] / "conf"
PLACES = sorted(
    str(path.relative_to(CONF).with_suffix("")) for path in CONF.rglob("*.yaml") if CONF / "hydra" not in path.parents
)
"""Without conf/hydra, which is tested where --help and sweeps are."""
ATTENTION = "model=transformer model.heads=2"
NEEDS = {
    **{f"position/{path.stem}": ATTENTION for path in (CONF / "position").glob("*.yaml") if path.stem != "none"},
    "task/text": "task.path=text.txt task.length=16",
    "measure/text": "task=text task.path=text.txt task.length=16",
    "measure/roles": "task=roles",
}
"""What a file does not go without."""
NOT_CHOSEN = {"config", "backbone"}
"""Files that every run uses."""


def marked(place):
    """Many models are slow to compile; a few stand for them among the fast tests."""
    few = place.split("/")[0] not in ("model", "position") or place in ("model/ssm", "model/hybrid", "position/rope")
    return pytest.param(place, marks=() if few else pytest.mark.slow)


@pytest.fixture(scope="module", autouse=True)
def _compiled_in_a_hurry():
    # what is tested here is not numbers, and half of the time would go into optimising programs that run once
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


def test_every_folder_of_conf_is_a_group_of_the_command_line():
    assert {place.split("/")[0] for place in PLACES if place not in NOT_CHOSEN} == set(GROUPS)


@pytest.mark.parametrize("place", [marked(place) for place in PLACES if place not in NOT_CHOSEN])
def test_it_trains_two_steps(command, tmp_path, place):
    shutil.copy(CONF.parent / "README.md", tmp_path / "text.txt")
    group, name = place.split("/")
    words = f"{group}={name} {NEEDS.get(place, '')} model.width=8 train.batch_size=4 train.steps=2"
    trained = []

    def two_steps(job):
        task, program = build(job)
        assert schedule(job).chunk >= 1
        states = program.init(np.arange(2), np.full(2, program.optimizer.learning_rate))
        states, metrics = program.advance(states, task, jnp.int32(2))
        trained.append(jax.device_get((states, metrics)))
        for measure in job.config.measure.values():  # traced, not compiled: what they find is tested with them
            measure = partial(program.measure, instantiate(measure), task=task, key=jax.random.key(0))
            for curve in jax.eval_shape(measure, states).values():
                assert curve.values.shape == (2, *(len(values) for _, values in curve.axes))
        return 0

    typed = command(words, tmp_path, run=two_steps)
    assert typed.code == 0, typed.lines
    ((states, metrics),) = trained
    assert states.step.tolist() == [2, 2]
    assert states.diverged_at.tolist() == [-1, -1]
    assert all(np.isfinite(values).all() for values in metrics.values())
