"""What a run has to say, as `results.json` and TensorBoard record it: known before training, after it, and measured."""

import math
from itertools import product
from typing import Any

import jax
import numpy as np
from hydra.utils import instantiate
from jaxtyping import Array, Bool
from omegaconf import OmegaConf

from seqlab.commandline import Job, leaves
from seqlab.matching import deviation
from seqlab.measures import controls, cost
from seqlab.reporting.figures import measure_figures, tuning_figures
from seqlab.reporting.results import Results, markdown, versions
from seqlab.reporting.tensorboard import TensorBoard
from seqlab.reporting.tuning import grid, of_judged, tuned, untuned
from seqlab.tasks.base import Task
from seqlab.training.fit import Fitted
from seqlab.training.program import ALIVE, UNSOLVED, Program
from seqlab.training.stopping import StopRequest
from seqlab.types import Curve

MEASURE_KEY = 1


def members(job: Job) -> list[tuple[float, int]]:
    """The population's learning rates, each with every seed.

    Raises:
        ValueError: a rate is not a positive number, or a seed is beyond 32 bits.
    """
    config = job.config
    rates = list(config.population.learning_rates)
    seeds = range(config.seed, config.seed + config.population.seeds)
    if not rates or not all(isinstance(rate, int | float) and 0 < rate < math.inf for rate in rates):
        raise ValueError(f"population.learning_rates={rates}: use one positive number or more, as in [0.001,0.003]")
    if len(set(rates)) < len(rates):
        raise ValueError(f"population.learning_rates={rates} has a rate twice; use population.seeds for more of one")
    if seeds[-1] >= 2**32:
        raise ValueError(f"seed={config.seed}: the population's seeds must stay below 2^32; use a smaller one")
    return list(product(rates, seeds))


def blank_results(job: Job, task: Task, program: Program) -> Results:
    """What is known before anything is computed. Traces the model on the task's examples.

    Raises:
        ValueError: they do not fit together.
    """
    batch = jax.eval_shape(lambda: task.sample(jax.random.key(0), program.batch_size, "valid"))
    model = program.abstract_model
    size = {
        "parameters": cost.parameters(model),
        "state_bytes": cost.state_bytes(model, task.length),
        "flops_per_token": cost.flops_per_token(model, task.length, batch.scored.shape[1]),
    }
    return {
        "status": "failed",
        "command": job.command,
        "config": OmegaConf.to_container(job.config, resolve=True),
        "versions": versions(),
        "device": f"{jax.device_count()} x {jax.devices()[0].device_kind}",
        "members": [
            {
                "seed": seed,
                "learning_rate": rate,
                "status": "failed",
                "metrics": {},
                "validation": None,
                "solved_at": None,
            }
            for rate, seed in members(job)
        ],
        "tuning": untuned(task.main_metric, task.higher_is_better, list(job.config.population.learning_rates)),
        "match": deviation(job, size),
        "measures": {},
        "ceilings": task.ceilings(),
        "controls": {},
        "cost": size | dict.fromkeys(("tokens_per_second", "compile_seconds", "train_seconds")),
    }


def add_training(results: Results, fitted: Fitted) -> None:
    results["status"] = fitted.status
    for member, diverged_at in zip(results["members"], fitted.states.diverged_at.tolist(), strict=True):
        member["status"] = fitted.status if diverged_at == ALIVE else "diverged"
    for quantity in ("tokens_per_second", "compile_seconds", "train_seconds"):
        results["cost"][quantity] = getattr(fitted, quantity)


def add_tuning(results: Results, task: Task, fitted: Fitted) -> None:
    """How each member did on the validation split, and the learning rate chosen by that."""
    for member, step in zip(results["members"], fitted.states.solved_at.tolist(), strict=True):
        member["solved_at"] = None if step == UNSOLVED else step
    if fitted.validation:
        alive = np.asarray(fitted.states.diverged_at) == ALIVE
        scores = of_the_living(fitted.validation[task.main_metric], alive)
        for member, score in zip(results["members"], scores.tolist(), strict=True):
            member["validation"] = score
        by_rate = scores.reshape(len(results["tuning"]["learning_rates"]), -1)
        results["tuning"] = tuned(results["tuning"], by_rate)


def add_measures(results: Results, job: Job, task: Task, fitted: Fitted, stop: StopRequest) -> None:
    """Runs the task's measures and the controls on the trained population.

    Raises:
        StoppedError: a signal came in between.
    """
    key, program = jax.random.key(MEASURE_KEY), fitted.program
    curves: dict[str, Curve] = {}
    for measure in job.config.measure.values():
        stop.check()
        curves |= program.measure(instantiate(measure), fitted.states, task, key, program.compute_dtype)
    stop.check()
    alive = np.asarray(fitted.states.diverged_at) == ALIVE
    results["measures"] = {
        name: {"axes": dict(curve.axes), "values": of_the_living(curve.values, alive)}
        for name, curve in sorted(curves.items(), key=lambda item: item[0] != task.main_metric)  # the main one first
    }
    numbers = {name: measure["values"] for name, measure in results["measures"].items() if not measure["axes"]}
    for index, member in enumerate(results["members"]):
        member["metrics"] = {name: float(values[index]) for name, values in numbers.items()}

    expected = controls.expected(program.abstract_model, task.length)
    found = program.measure(controls.Controls(), fitted.states, task, key)
    stop.check()
    for name, expectation in expected.items():
        values = np.asarray(found[name].values)[alive].tolist()
        if not values:  # there is no member to control
            continue
        worst = max(values) if expectation == "zero" else min(values)
        holds = all(controls.holds(name, expectation, value) for value in values)
        results["controls"][name] = {"expected": expectation, "value": worst, "holds": holds}


def of_the_living(values: Array | np.ndarray, alive: Bool[np.ndarray, " P"]) -> np.ndarray:
    """The values [P, ...] with NaN in the place of members that diverged."""
    found = np.array(values)
    found[~alive] = np.nan
    return found


def report(results: Results, board: TensorBoard, step: int) -> None:
    """Writes the outcome of a run of `step` steps to TensorBoard.

    One step later, where a session that takes up the last checkpoint makes void what one before it wrote.
    """
    step += 1
    for name, figure in measure_figures({"": results}).items():
        if results["measures"][name]["axes"]:  # the others are scalars
            board.figure(name, step, figure)
    for name, figure in tuning_figures({"": results}).items():
        board.figure(name, step, figure)
    board.text("result", step, markdown(results))
    names = results["members"][0]["metrics"]
    metrics = {f"test/{n}": of_judged(results, [m["metrics"][n] for m in results["members"]]) for n in names}
    if grid(results) and results["tuning"]["learning_rate"] is not None:
        tuning = results["tuning"]
        metrics |= {f"tuning/{name}": np.array([float(tuning[name])]) for name in ("learning_rate", "at_edge")}
    board.session_end(results["status"], metrics, step)


def hyperparameters(job: Job, results: Results) -> dict[str, Any]:
    """The words of the command line that a comparison sorts by: choices, and plain values outside constructor calls."""
    values = OmegaConf.to_container(job.config, resolve=True)
    plain = {
        key: value
        for key, value in leaves(values)
        if key.split(".")[0] in ("task", "model", "match", "train", "optimizer", "population", "seed", "scan")
        and ".build" not in key
        and "_target_" not in key
        and not (key == "optimizer.learning_rate" and len(results["tuning"]["learning_rates"]) > 1)  # it is in the grid
    }
    choices = {group: choice for group, choice in job.choices.items() if group not in ("measure", "mesh", "experiment")}
    return choices | plain | {name: results["cost"][name] for name in ("parameters", "state_bytes", "flops_per_token")}
