"""Models made equal before they are compared: as many parameters, bytes of state or operations a token as another one.

`match=parameters match.to=transformer` fits the width of a model (or its state size) so that it comes nearest. What is
looked at are traced models: nothing is computed, and a probe takes a fraction of a second.
"""

import copy
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache, partial
from math import lcm, log
from typing import Any

from hydra import compose
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf, open_dict

from seqlab.commandline import GROUPS, Job, fill_pattern, leaves, nearest_name

WORDS = ("width", "state_size")
LARGEST = 2**20
CLOSE, FAR = 0.02, 0.5
"""Shares of the target by which the nearest may miss it: beyond the first it is said, beyond the second refused."""


def matched(job: Job) -> Job:
    """The job with the width or state size that `match=` asks for; the same job where it asks for nothing.

    Must be called where the job was composed, since the model to match is composed there too.

    Raises:
        ValueError: the target is no number and no model, no word brings the model near it, or the word was typed too.
    """
    asked = job.config.match
    if asked.quantity is None:
        if asked.to is not None:
            raise ValueError(f"match.to={asked.to} needs match=parameters, match=state_bytes or match=flops")
        return job
    model = str(job.choices["model"])
    typed = OverridesParser.create().parse_overrides(list(HydraConfig.get().overrides.task))
    task = instantiate(job.config.task, _convert_="all")
    like = reference(asked.to, typed)
    size = partial(quantity, asked.quantity, task)
    try:
        target = asked.to if like is None else size(asked.to, like)
    except ValueError as error:
        raise ValueError(f"match.to={asked.to} with the other words typed: {error}") from error

    @cache
    def probe(word: str, value: int) -> int | float:
        return size(model, with_word(job.config, word, value))

    word = fitted_word(job, probe)
    if f"model.{word}" in [override.key_or_group for override in typed] and (like is None or word not in like.model):
        raise ValueError(
            f"model.{word} is what match={asked.quantity} fits: leave it out, or name a model that has it in match.to, "
            "whose it is then"
        )
    step = step_of(job, word, probe)
    value = nearest(partial(probe, word), step, target)
    reached = probe(word, value)
    if abs(reached / target - 1) > FAR:
        raise ValueError(
            f"match.to={asked.to}: no model.{word} brings model={model} near {target:,.0f} {asked.quantity}; "
            f"the nearest, model.{word}={value}, has {reached:,.0f}"
        )
    config = with_word(job.config, word, value)
    with open_dict(config):
        config.match.by, config.match.target = word, target
    job = replace(job, config=config)
    show(job, reached, step)
    return job


def reference(to: Any, typed: list) -> DictConfig | None:
    """The configuration of the model to match, with those of the typed words that exist there; None for a number.

    Raises:
        ValueError: it is neither.
    """
    if isinstance(to, int | float) and not isinstance(to, bool):
        if not 0 < to < float("inf"):
            raise ValueError(f"match.to={to} must be positive")
        return None
    models = GlobalHydra.instance().config_loader().get_group_options("model")
    if to not in models:
        if to is None:
            raise ValueError(f"match.to= is missing; use a number or one of {', '.join(models)}")
        raise ValueError(f"match.to={to} is no number and no model; {nearest_name(str(to), models)}")
    typed = [o for o in typed if o.key_or_group != "model" and o.key_or_group.split(".")[0] != "match"]
    choices = [o.input_line for o in typed if o.key_or_group in GROUPS]
    plain = compose("config", [f"model={to}", *choices])
    keys = {key for key, _ in leaves(OmegaConf.to_container(plain))}
    known = {".".join(key.split(".")[:depth]) for key in keys for depth in range(1, key.count(".") + 2)}
    words = [o.input_line for o in typed if o.key_or_group in known and o.key_or_group not in GROUPS]
    config = compose("config", [f"model={to}", *choices, *words])
    fill_pattern(config)
    return config


def with_word(config: DictConfig, word: str, value: int) -> DictConfig:
    config = copy.deepcopy(config)
    config.model[word] = value
    return config


def quantity(name: str, task: Any, model: str, config: DictConfig) -> int | float:
    """What is matched, of the model that a configuration builds.

    Raises:
        ValueError: it cannot be built, or has no state.
    """
    import jax
    from flax import nnx

    from seqlab.measures import cost

    build = partial(instantiate(config.model.build), task.vocab.size)
    try:
        abstract = nnx.eval_shape(lambda: build(rngs=nnx.Rngs(0)))
    except TypeError as error:  # an argument that a constructor does not know
        raise ValueError(f"model={model} cannot be built: {error}") from error
    task = task.asked_of(abstract.causal)
    if name == "parameters":
        return cost.parameters(abstract)
    if name == "flops":
        scored = jax.eval_shape(lambda: task.sample(jax.random.key(0), 1, "valid")).scored.shape[1]
        return cost.flops_per_token(abstract, task.length, scored)
    held = cost.state_bytes(abstract, task.length)
    if held is None:
        raise ValueError(f"model={model} keeps no state between tokens; use match=parameters or match=flops")
    return held


def fitted_word(job: Job, probe: Callable[[str, int], int | float]) -> str:
    """The word of the model that is fitted.

    Raises:
        ValueError: the model has no such word, or it does not change what is matched.
    """
    asked, model = job.config.match, job.choices["model"]
    if asked.by not in ("auto", *WORDS):
        raise ValueError(f"match.by={asked.by} is unknown; use auto, {' or '.join(WORDS)}")
    has_state_size = "state_size" in job.config.model
    if asked.by == "state_size" and not has_state_size:
        raise ValueError(f"match.by=state_size: model={model} has no state_size; use match.by=width")

    def counts(word: str) -> bool:
        step = step_of(job, word, probe)
        return probe(word, 5 * step) != probe(word, 7 * step)

    if asked.by == "auto":
        return "state_size" if asked.quantity == "state_bytes" and has_state_size and counts("state_size") else "width"
    if not counts(asked.by):
        raise ValueError(f"match.by={asked.by} changes no {asked.quantity} of model={model}; use match.by=auto")
    return asked.by


def step_of(job: Job, word: str, probe: Callable[[str, int], int | float]) -> int:
    """Of what a word must be a multiple: heads share a width equally, and rotated ones need an even share.

    Raises:
        ValueError: the model cannot be built at all.
    """
    words = leaves(OmegaConf.to_container(job.config.model, resolve=True))
    heads = lcm(*(value for key, value in words if key.rsplit(".")[-1] in ("heads", "groups", "blocks")))
    refusal = None
    for step in sorted({factor * share for factor in (1, 2, 4) for share in (1, heads)}):
        try:
            probe(word, 5 * step)
            probe(word, 7 * step)
        except ValueError as error:
            refusal = error
        else:
            return step
    raise ValueError(str(refusal))


def nearest(size: Callable[[int], int | float], step: int, target: int | float) -> int:
    """The multiple of `step` whose size, which grows with it, is nearest to the target.

    Sizes are nearly powers of what they grow with, so a guess follows the power through the two before it; after some,
    it halves what is left. Few probes matter, since an S5 of thousands of modes takes a minute to trace.
    """
    low, high = 0, LARGEST // step  # the first is too small, the last large enough
    before, last, probes = 5, 7, 0
    while True:
        below, at = size(before * step), size(last * step)
        if at == target:
            return last * step
        low, high = (max(low, last), high) if at < target else (low, min(high, last))
        if high - low <= 1:
            return min((k * step for k in (low, high) if k), key=lambda value: abs(size(value) - target))
        power = log(at / below) / log(last / before)
        guess = last * (target / at) ** (1 / power) if power > 0 and probes < 8 else (low + high) / 2
        before, last, probes = last, int(min(max(guess, low + 1), high - 1)), probes + 1


def deviation(job: Job, cost: Mapping[str, Any]) -> dict[str, Any] | None:
    """What a matched job came to, for its results; None where nothing was matched."""
    asked = job.config.match
    if asked.quantity is None:
        return None
    reached = cost["flops_per_token" if asked.quantity == "flops" else asked.quantity]
    typed = {name: asked[name] for name in ("quantity", "to", "by", "target")}
    value = job.config.model[asked.by]
    return typed | {"value": value, "reached": reached, "deviation": reached / asked.target - 1}


def show(job: Job, reached: int | float, step: int) -> None:
    """Prints what was chosen, and warns where it is not equal enough."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    asked = job.config.match
    off = reached / asked.target - 1
    table = Table("model", "fitted", asked.quantity, f"of {asked.to}", "off by")
    fitted = f"model.{asked.by}={job.config.model[asked.by]}"
    style = "bold yellow" if abs(off) > CLOSE else ""
    table.add_row(
        job.choices["model"], fitted, f"{reached:,.0f}", f"{asked.target:,.0f}", Text(f"{off:+.2%}", style=style)
    )
    console = Console(stderr=True, markup=False, highlight=False)
    console.print(table)
    if style:
        line = f"no equal match: {off:+.1%} is the nearest, since model.{asked.by} comes in steps of {step}"
        console.print(Text(line, style=style))
