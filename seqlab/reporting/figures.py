"""Figures of populations: curves with a band, bars with a dot a member. No pyplot state, no display needed."""

from collections.abc import Mapping, Sequence
from math import ceil
from typing import TypeAlias

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from seqlab.reporting.results import Results, labels
from seqlab.reporting.statistics import Members, interquartile_mean
from seqlab.reporting.tuning import of_judged, rate_scores

# Ten colours that stay apart under every common colour blindness and in grey (Petroff 2021, arXiv:2107.02270); the
# markers say the same once more.
COLORS = matplotlib.color_sequences["petroff10"]
MARKERS = "os^Dv<>PX*"
DASHES = ((0, (6, 3)), (0, (2, 2)), (0, (8, 2, 2, 2)), (0, (1, 3)))
Axis: TypeAlias = Sequence | np.ndarray
"""The X values of a curve: numbers or words."""

WIDTH, HEIGHT, LEGEND_ROW = 6.4, 4.0, 0.22
"""In inches; a legend stands below the axes and the figure grows with its rows."""


def measure_figures(runs: Mapping[str, Results]) -> dict[str, Figure]:
    """All runs side by side: a figure for each measure over one axis (curves) or over none (bars), by its name.

    Of each run its members at the chosen learning rate are shown. The ceilings of the runs' task are drawn where they
    belong: at bars all of that measure, at curves chance.
    """
    runs = dict(zip(labels(list(runs)), runs.values(), strict=True))
    figures = {}
    for name in dict.fromkeys(name for results in runs.values() for name in results["measures"]):
        measures = {run: results["measures"][name] for run, results in runs.items() if name in results["measures"]}
        first = runs[next(iter(measures))]
        axes = list(measures[next(iter(measures))]["axes"])
        values = {run: of_judged(runs[run], m["values"]) for run, m in measures.items() if list(m["axes"]) == axes}
        values = {run: members for run, members in values.items() if np.isfinite(members).any()}
        if not values:  # every member diverged
            continue
        references = _ceilings_of(name, first)
        label = name.replace("_", " ")
        if not axes:
            figures[name] = bar_figure(values, label, references)
        elif len(axes) == 1:
            points = {run: measures[run]["axes"][axes[0]] for run in values}
            wide = all(_wide(xs) for xs in points.values())
            chance = {key: value for key, value in first["ceilings"].items() if key == "chance"}
            curves = {run: (points[run], values[run]) for run in values}
            figures[name] = curve_figure(curves, axes[0], label, chance, wide)
    return figures


def tuning_figures(runs: Mapping[str, Results]) -> dict[str, Figure]:
    """Validation scores against the learning rate, a curve a run with a ring around the rate that was chosen.

    One figure for each main metric, `tuning/<metric>`, of the runs that had several rates. A rate at which too many
    seeds diverged for a mean has no point.
    """
    curves: dict[str, dict[str, tuple[np.ndarray, np.ndarray]]] = {}
    chosen: dict[str, list[float]] = {}
    for label, results in zip(labels(list(runs)), runs.values(), strict=True):
        tuning = results["tuning"]
        validation = np.array(tuning["validation"], np.float64)
        if len(validation) < 2 or tuning["learning_rate"] is None:
            continue
        validation[~np.isfinite(rate_scores(validation, tuning["higher_is_better"]))] = np.nan
        rates = np.array(tuning["learning_rates"], np.float64)
        order = [i for i in np.argsort(rates) if np.isfinite(rates[i])]
        curves.setdefault(tuning["metric"], {})[label] = (rates[order], validation[order].T)
        chosen.setdefault(tuning["metric"], []).append(tuning["learning_rate"])
    figures = {}
    for metric, of_metric in curves.items():
        figure = curve_figure(of_metric, "learning rate", f"{metric.replace('_', ' ')} on the validation split")
        (axes,) = figure.axes
        ticks = np.unique(np.concatenate([rates for rates, _ in of_metric.values()]))
        axes.set_xscale("log")
        axes.set_xticks(ticks, [f"{rate:g}" for rate in ticks])
        axes.minorticks_off()
        for line, rate in zip(list(axes.lines), chosen[metric], strict=True):
            height = np.asarray(line.get_ydata())[np.asarray(line.get_xdata()).tolist().index(rate)]
            axes.plot(rate, height, marker="o", markersize=12, markerfacecolor="none", color=line.get_color())
        figures[f"tuning/{metric}"] = figure
    return figures


def _wide(axis: Axis) -> bool:
    """Whether an axis is best drawn by doublings."""
    return not any(isinstance(x, str) for x in axis) and min(axis) > 0 and max(axis) >= 8 * min(axis)


def _ceilings_of(measure: str, results: Results) -> dict[str, float]:
    """Ceilings are named after their measure, `measure/strategy`, those of the main metric by strategy alone."""
    main = next(iter(results["members"][0]["metrics"]), None)
    if measure == main:
        return {name.replace("_", " "): value for name, value in results["ceilings"].items() if "/" not in name}
    prefix = f"{measure}/"
    return {
        name.removeprefix(prefix).replace("_", " "): value
        for name, value in results["ceilings"].items()
        if name.startswith(prefix)
    }


def curve_figure(
    curves: Mapping[str, tuple[Axis, Members]],
    x_label: str,
    y_label: str,
    references: Mapping[str, float] | None = None,
    log_x: bool = False,
) -> Figure:
    """Draws for each label the interquartile mean of the members and a band, its 95 % interval where there is one.

    Args:
        curves: label -> (values of the x axis [X], values of the members [P, X]).
        references: label -> height of a dashed line: chance, a ceiling.
        log_x: a logarithmic axis to base 2.
    """
    figure, axes = _axes(curves, references)
    for i, (label, (x, values)) in enumerate(curves.items()):
        mean, low, high = interquartile_mean(values)
        color, marker = COLORS[i % len(COLORS)], MARKERS[i % len(MARKERS)]
        axes.plot(x, mean, color=color, marker=marker, markersize=5, label=label)
        if np.isfinite(low).any():
            axes.fill_between(x, low, high, color=color, alpha=0.18, linewidth=0)
    if log_x:
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:g}")
    _references(axes, references)
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    _legend(figure, axes)
    return figure


def bar_figure(bars: Mapping[str, Members], y_label: str, references: Mapping[str, float] | None = None) -> Figure:
    """Draws for each label a bar as high as the interquartile mean of the values [P], and every member as a dot.

    Args:
        references: label -> height of a dashed line: chance, a ceiling.
    """
    longest = max(map(len, bars), default=0)
    crowded = len(bars) * longest > 60  # letters that fit side by side
    in_legend = crowded and longest > 18
    figure, axes = _axes(dict.fromkeys(bars, ()) if in_legend else {}, references)
    for i, (label, values) in enumerate(bars.items()):
        members = np.atleast_1d(np.asarray(values, dtype=np.float64))
        value, color = float(interquartile_mean(members).value), COLORS[i % len(COLORS)]
        axes.bar(i, value, width=0.7, color=color, alpha=0.6, label=label if in_legend else None)
        offsets = np.linspace(-0.2, 0.2, len(members)) if len(members) > 1 else np.zeros(1)
        axes.plot(i + offsets, members, linestyle="", marker="o", markersize=4, color="black", markeredgecolor="white")
    _references(axes, references)
    if in_legend:
        axes.set_xticks([])
    else:
        axes.set_xticks(range(len(bars)), list(bars), rotation=30 * crowded, ha="right" if crowded else "center")
    axes.set_ylabel(y_label)
    _legend(figure, axes)
    return figure


def _axes(curves: Mapping[str, tuple], references: Mapping[str, float] | None) -> tuple[Figure, Axes]:
    labels = [*curves, *(references or {})]
    rows = ceil(len(labels) / _columns(labels))
    figure = Figure(figsize=(WIDTH, HEIGHT + LEGEND_ROW * rows), layout="constrained")
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="0.9")
    axes.set_axisbelow(True)
    return figure, axes


def _references(axes: Axes, references: Mapping[str, float] | None) -> None:
    for i, (label, y) in enumerate((references or {}).items()):
        axes.axhline(y, color="0.35", linewidth=1.2, linestyle=DASHES[i % len(DASHES)], label=label, zorder=1)


def _legend(figure: Figure, axes: Axes) -> None:
    handles, labels = axes.get_legend_handles_labels()
    if labels:
        figure.legend(handles, labels, loc="outside lower center", ncols=_columns(labels), frameon=False, fontsize=9)


def _columns(labels: Sequence[str]) -> int:
    """As many columns of the longest label as the width holds."""
    return max(1, min(4, int(96 / (max(map(len, labels), default=0) + 7))))
