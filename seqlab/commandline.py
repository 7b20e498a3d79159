"""From what was typed to a checked configuration and a directory: composition, refusals in one line, exit codes.

Imports neither JAX nor anything that does, so that --help and refusals answer at once.
"""

import difflib
import re
import shlex
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.utils import get_args_parser
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep
from hydra.errors import HydraException
from omegaconf import DictConfig, ListConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

GROUPS = ("task", "model", "position", "norm", "mlp", "optimizer", "train", "measure", "match", "mesh", "experiment")
NOT_PART_OF_THE_RUN = ("runs", "overwrite", "mesh", "distributed", "population.max_parallel")
"""Keys that say where and whether, not what: they neither name a run nor bind its checkpoints."""

OK, FAILED, REFUSED, DIVERGED = 0, 1, 2, 3

_packaged = Path(__file__).resolve().parent / "conf"  # in a wheel; in a checkout it stands beside the package
CONFIG_PATH = str(_packaged if _packaged.is_dir() else _packaged.parent.parent / "conf")


@dataclass(frozen=True)
class Job:
    """One run as asked for: its configuration, where it lives, and the command that asks for it again."""

    config: DictConfig
    choices: Mapping[str, str | None]
    """Which file was taken of each group, for instance {"model": "ssm"}."""
    directory: Path
    command: str

    @property
    def name(self) -> str:
        """<task>/<model>/<what differs from the defaults>"""
        return "/".join(self.directory.parts[-3:])


class RefusedError(Exception):
    """Bad input: one line that names the value and what would work. Nothing was written."""


@contextmanager
def refusals() -> Iterator[None]:
    """Within, what cannot be composed, does not fit together or cannot be opened is bad input."""
    try:
        yield
    except (ValueError, OSError, HydraException, OmegaConfBaseException) as error:
        raise RefusedError(one_line(error)) from error


def typed_words() -> str:
    """The current job as typed: unresolved, so that `${...}` stays."""
    return shlex.join(map(str, OmegaConf.to_container(HydraConfig.get().overrides.task) or ()))


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def one_line(error: BaseException) -> str:
    """What is wrong, in one line."""
    if isinstance(error, HydraException | OmegaConfBaseException):
        cause = error.__cause__
        if isinstance(cause, ValueError | OSError | TypeError | ImportError) and not isinstance(
            cause, OmegaConfBaseException
        ):
            return one_line(cause)  # a constructor's own refusal, an argument that it does not know, a wrong _target_
        unknown = _unknown_name()
        if unknown:
            return unknown
    elif isinstance(error, OSError) and error.filename:
        return f"{error.filename}: {error.strerror}"
    return next(iter(str(error).strip().replace(":\n", ": ").splitlines()), repr(error))


def _unknown_name() -> str | None:
    """The first name on the command line that does not exist, with the nearest that does; None if all exist."""
    if GlobalHydra.instance().is_initialized():  # the configuration was composed, so all names exist
        return None
    typed = get_args_parser().parse_args()
    if typed.config_dir and not Path(typed.config_dir).is_dir():
        return f"--config-dir {typed.config_dir} is not a directory"
    for word in typed.overrides:
        if "=" not in word and not word.startswith("~"):
            return f"{word} sets nothing; write key=value, such as model=ssm"
    try:
        overrides = OverridesParser.create().parse_overrides(typed.overrides)
    except HydraException:
        return None
    for override in overrides:
        if override.is_sweep_override() and not typed.multirun:
            return f"{override.input_line} is a sweep; add -m, or write a list as [a,b]"
    with initialize_config_dir(CONFIG_PATH, version_base="1.3"):
        loader = GlobalHydra.instance().config_loader()
        assert isinstance(loader, ConfigLoaderImpl)
        if typed.config_dir:
            loader.get_search_path().prepend("command-line", f"file://{Path(typed.config_dir).absolute()}")
            loader.repository.initialize_sources(loader.get_search_path())
        valid = []
        for override in overrides:
            group = override.key_or_group
            if group not in GROUPS:
                continue
            choices = loader.get_group_options(group)
            value = override.value()
            for choice in value.list if isinstance(value, ChoiceSweep) else [value]:
                if choice is not None and choice not in choices:
                    return f"{group}={choice} is unknown; {nearest_name(str(choice), choices)}"
                valid.append(f"{group}={'null' if choice is None else choice}")
        keys = [key for key, _ in leaves(OmegaConf.to_container(compose("config", valid)))]
    branches = {key.rsplit(".", depth)[0] for key in keys for depth in range(1, key.count(".") + 1)}
    for override in overrides:
        key = override.key_or_group
        if key == "pattern" and key not in keys:
            return "pattern= is a word of model=hybrid"
        if override.is_add() or key.startswith("hydra") or key in {*GROUPS, *keys, *branches}:
            continue
        return f"{key} is unknown; {nearest_name(key, [*GROUPS, *keys])}"
    return None


def nearest_name(name: str, valid: list[str]) -> str:
    near = difflib.get_close_matches(name, valid, n=1, cutoff=0.6)
    if not near:
        near = [v for v in valid if v.rsplit(".")[-1] == name.rsplit(".")[-1]]
    if near:
        return f"did you mean {near[0]}?"
    if len(valid) > 40:
        return "--cfg job shows every key"
    return f"use {', '.join(valid)}" if valid else "there is none"


def job_of(config: DictConfig, typed: str) -> Job:
    choices = {name: choice for name, choice in HydraConfig.get().runtime.choices.items() if name in GROUPS}
    for group in ("task", "model"):
        if choices.get(group) is None:
            raise ValueError(f"{group}= is missing; --help lists the choices")
    plain = compose("config", [f"task={choices['task']}", f"model={choices['model']}"], return_hydra_config=True)
    plain_choices = plain.hydra.runtime.choices
    chosen = {
        name: choice
        for name, choice in choices.items()
        if choice != plain_choices[name] and name != "experiment" and part_of_the_run(name)
    }
    defaults = compose("config", [f"{name}={choice}" for name, choice in choices.items() if name != "experiment"])
    usual = dict(leaves(OmegaConf.to_container(defaults)))
    usual_values = dict(leaves(OmegaConf.to_container(defaults, resolve=True)))
    asked = dict(leaves(OmegaConf.to_container(config)))
    changed = {key: value for key, value in asked.items() if key not in usual or value != usual[key]}
    for key, value in changed.items():
        _check_kind(key, value, usual_values.get(key))
    differences = chosen | {key: value for key, value in changed.items() if part_of_the_run(key)}
    fill_pattern(config)
    directory = Path(config.runs) / choices["task"] / choices["model"] / _directory_name(differences)
    user_directory = get_args_parser().parse_args().config_dir
    words = ["python -m seqlab.run", f"--config-dir {shlex.quote(user_directory)}" if user_directory else "", typed]
    return Job(config, choices, directory, " ".join(filter(None, words)))


def part_of_the_run(key: str) -> bool:
    return not any(f"{key}.".startswith(f"{name}.") for name in NOT_PART_OF_THE_RUN)


def fill_pattern(config: DictConfig) -> None:
    """Where there is a pattern of mixers: takes each from the model of its name, as if that were asked for alone.

    Raises:
        ValueError: a name is no model, or `model.parts` sets what a model does not have.
    """
    if "pattern" not in config:
        return
    names = list(config.pattern if isinstance(config.pattern, ListConfig) else [config.pattern])
    if not names:
        raise ValueError("pattern=[] names no model; use one or more, as in pattern=[ssm,attention]")
    models = [m for m in GlobalHydra.instance().config_loader().get_group_options("model") if m != "hybrid"]
    for name in [*names, *config.model.parts]:
        if name not in models:
            raise ValueError(
                f"pattern={_text(names)}: {name} is no model of its own; {nearest_name(str(name), models)}"
            )
    parts = {name: compose("config", [f"model={name}"]).model for name in dict.fromkeys(names)}
    shared = set(config.model)
    for name, changes in config.model.parts.items():
        if name not in parts:
            raise ValueError(f"model.parts.{name} is not in pattern={_text(names)}")
        if not isinstance(changes, DictConfig):
            raise ValueError(f"model.parts.{name}={changes} sets no word; write model.parts.{name}.WORD=VALUE")
        words, asked = (dict(leaves(OmegaConf.to_container(tree))) for tree in (parts[name], changes))
        own = {word: value for word, value in words.items() if word.split(".")[0] not in shared}
        for word, value in asked.items():
            if word not in own:
                raise ValueError(f"model.parts.{name}.{word} is unknown; {nearest_name(word, list(own))}")
            _check_kind(f"model.parts.{name}.{word}", value, own[word])
        parts[name] = OmegaConf.merge(parts[name], changes)
    with open_dict(config):
        config.model.parts = parts
        config.model.build.mixer = [f"${{model.parts.{name}.build.mixer}}" for name in names]
        if config.model.depth is None:
            config.model.depth = len(names)
        _check_kind("model.depth", config.model.depth, len(names))


def leaves(tree: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys and their values; a list is a value, and so is an empty mapping."""
    if isinstance(tree, dict) and tree:
        for key, value in tree.items():
            yield from leaves(value, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix, tree


def _check_kind(key: str, value: Any, default: Any) -> None:
    """Raises ValueError where a value cannot stand in the place of its default: counts stay counts."""
    interpolated = isinstance(value, str) and "${" in value
    if default is None or isinstance(default, str) or interpolated:
        return
    if isinstance(default, bool):
        fits = isinstance(value, bool) or (key == "model.bidirectional" and isinstance(value, str))
    elif isinstance(default, int | float):
        fits = isinstance(value, int if isinstance(default, int) else int | float) and not isinstance(value, bool)
    else:
        fits = isinstance(value, type(default))
    if not fits:
        raise ValueError(f"{key}={_text(value)} is not of the kind of its default, {_text(default)}")
    if isinstance(default, int | float) and not isinstance(default, bool):
        least = 1 if isinstance(default, int) and default > 0 else 0
        if not float(value) >= least:
            raise ValueError(f"{key}={value} must be at least {least}; its default is {default}")


def _directory_name(differences: Mapping[str, Any]) -> str:
    """`position=rope,train.steps=300`, or `defaults`; unusual characters are replaced and long names cut, and then the
    name ends in a digest, so that two different runs never share a directory.
    """
    if not differences:
        return "defaults"
    plain = {k: "+".join(map(str, v)) if isinstance(v, list) else v for k, v in differences.items()}
    exact = ",".join(f"{key}={value}" for key, value in sorted(plain.items()))
    name = re.sub(r"[^\w.,=\-+]", "_", exact)
    if name != exact or len(name) > 150:
        name = f"{name[:140]}-{sha256(exact.encode()).hexdigest()[:8]}"
    return name


def _text(value: Any) -> str:
    return f"[{','.join(map(str, value))}]" if isinstance(value, list) else str(value)
