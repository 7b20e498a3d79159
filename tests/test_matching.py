"""What `match=` chooses is the nearest there is, which its neighbours show; and what cannot be matched is refused."""

import math
import random
from functools import cache, partial

import jax
import pytest
from flax import nnx
from hydra.utils import instantiate
from omegaconf import OmegaConf

from seqlab.matching import matched, nearest
from seqlab.measures import cost
from seqlab.reporting.results import read_results

SMALL = "task.length=16 task.pairs=2 task.vocab_size=17"


@pytest.fixture(scope="module")
def match(command, tmp_path_factory):
    """match("model=gru match=...") -> the matched job, its code and lines."""
    directory = tmp_path_factory.mktemp("match")

    def ask(line):
        jobs = []

        def run(job):
            from seqlab.commandline import refusals

            with refusals():
                jobs.append(matched(job))
            return 0

        typed = command(line, directory, run=run)
        assert not list(directory.iterdir())
        return jobs, typed

    return ask


def size(quantity, config):
    """By the very functions that write results.json, which tests/measures/test_cost.py holds against counts by hand."""
    task = instantiate(config.task, _convert_="all")
    build = partial(instantiate(config.model.build), task.vocab.size)
    model = nnx.eval_shape(lambda: build(rngs=nnx.Rngs(0)))
    if quantity == "parameters":
        return cost.parameters(model)
    if quantity == "state_bytes":
        return cost.state_bytes(model, task.length)
    return cost.flops_per_token(model, task.length, task.pairs)  # each pair is asked once


def changed(config, word, value):
    config = OmegaConf.create(OmegaConf.to_container(config))
    config.model[word] = value
    return config


@pytest.mark.parametrize("quantity", ["parameters", "state_bytes", "flops"])
@pytest.mark.parametrize(
    ("words", "step"),
    [
        ("model=rnn", 1),
        ("model=gru model.depth=3", 1),
        ("model=ssm", 1),
        ("model=transformer model.depth=1", 4),  # heads
        ("model=transformer position=rope model.depth=1", 8),  # heads of even width
        ("model=mamba", 1),
    ],
)
def test_no_neighbour_is_nearer(match, words, step, quantity):
    (job,), typed = match(f"{words} {SMALL} match={quantity} match.to=attention")
    assert typed.code == 0, typed.lines
    config, word = job.config, job.config.match.by
    assert word == ("state_size" if quantity == "state_bytes" and "transformer" not in words else "width")
    value, target = config.model[word], config.match.target
    off = abs(size(quantity, config) - target)
    for neighbour in (value - step, value + step):
        assert off <= abs(size(quantity, changed(config, word, neighbour)) - target)
    assert off / target < 0.15  # a step of heads, where they are few and wide


def test_sizes_that_grow_are_matched_in_few_probes():
    random.seed(0)
    for _ in range(300):
        square, line, constant = random.choice([0, 1, 3]), random.uniform(0, 50), random.choice([1, 10, 1000])
        step = random.choice([1, 2, 4, 8])

        @cache
        def size(value, square=square, line=line, constant=constant):
            return square * value**2 + line * value + 17 * math.ceil(value / 16) + constant

        target = math.exp(random.uniform(1, 15))
        value = nearest(size, step, target)
        few = size.cache_info().misses
        best = min(abs(size(k) - target) for k in range(step, value + 50 * step, step) if abs(k - value) <= 50 * step)
        assert abs(size(value) - target) == best
        assert value % step == 0 and few <= 30  # as many as halving a million would take and a guess at each


def test_the_model_to_match_has_the_other_words_that_were_typed(match):
    (job,), _ = match(f"model=gru {SMALL} match=parameters match.to=gru model.depth=3 mlp=gelu model.width=24")
    assert job.config.model.width == 24  # its own width, found again
    (other,), _ = match(f"model=gru {SMALL} match=parameters match.to=ssm model.state_size=100")
    assert other.config.match.target == size("parameters", changed(ssm_config(match), "state_size", 100))
    assert "match=parameters,match.to=ssm" in other.directory.name


def ssm_config(match):
    (job,), _ = match(f"model=ssm {SMALL}")
    return job.config


def test_without_a_match_the_job_stays_as_it_is(command, tmp_path):
    def run(job):
        assert matched(job) is job
        return 0

    assert command("model=gru", tmp_path, run=run).code == 0


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("model=gru match=parameters", "match.to= is missing; use a number or one of attention"),
        ("model=gru match=parameters match.to=transformr", "match.to=transformr is no number and no model"),
        ("model=gru match=parameters match.to=-5", "match.to=-5 must be positive"),
        ("model=gru match=parameters match.to=true", "match.to=True is no number"),
        ("model=gru match.to=5", "match.to=5 needs match=parameters"),
        ("model=gru match=paramters match.to=5", "did you mean parameters?"),
        ("model=gru match=parameters match.to=10", "the nearest, model.width=1, has"),
        ("model=gru match=parameters match.to=1e4 match.by=depth", "use auto, width or state_size"),
        ("model=transformer match=parameters match.to=1e4 match.by=state_size", "has no state_size"),
        ("model=ssm match=state_bytes match.to=1e4 match.by=width", "match.by=width changes no state_bytes"),
        ("model=gru match=parameters match.to=1e4 model.width=8", "leave it out"),
        ("model=gru match=state_bytes match.to=transformer model.state_size=8", "leave it out"),
        ("model=encoder match=state_bytes match.to=1e4", "model=encoder keeps no state"),
        ("model=gru match=state_bytes match.to=encoder", "match.to=encoder"),
        ("model=transformer position=rope match=parameters match.to=gru", "match.to=gru with the other words typed"),
    ],
)
def test_what_cannot_be_matched_gets_one_line(match, line, message):
    jobs, typed = match(line)
    assert (jobs, typed.code, len(typed.lines)) == ([], 2, 1)
    assert message in typed.lines[0]


def test_a_step_too_wide_is_said(match):
    _, typed = match("model=transformer model.heads=16 model.depth=1 match=parameters match.to=9000")
    assert any("no equal match" in line and "steps of 16" in line for line in typed.lines)


@pytest.fixture
def _compiled_in_a_hurry():
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.mark.usefixtures("_compiled_in_a_hurry")
def test_a_matched_run_records_its_match_and_is_found_again(command, tmp_path):
    line = (
        f"model=rnn {SMALL} model.depth=1 match=parameters match.to=transformer train.steps=2 population.seeds=1 "
        "train.batch_size=4 train.eval_batches=1 measure.recall.batches=1 measure.recall.batch_size=4"
    )
    typed = command(line, tmp_path)
    assert typed.code == 0, typed.lines
    (file,) = tmp_path.rglob("results.json")
    results = read_results(file.parent)
    match = results["match"]
    width = results["config"]["model"]["width"]
    assert (match["quantity"], match["to"], match["by"], match["value"]) == (
        "parameters",
        "transformer",
        "width",
        width,
    )
    assert OmegaConf.load(file.parent / "config.yaml").model.width == width != 64
    assert match["reached"] == results["cost"]["parameters"]
    assert match["deviation"] == match["reached"] / match["target"] - 1
    assert abs(match["deviation"]) < 0.02
    again = command(line, tmp_path)
    assert again.code == 0
    assert any("is finished already" in line for line in again.lines)
