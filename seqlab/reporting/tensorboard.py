"""The TensorBoard sink of a run, written with tensorboard's own record writer: no TensorFlow, no PyTorch."""

# pyright: reportAttributeAccessIssue=false
# The generated protobuf modules declare their classes at import only.

import io
import os
import socket
import struct
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, final

import numpy as np
from matplotlib.figure import Figure
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.hparams import metadata as hparams_metadata
from tensorboard.plugins.hparams.api_pb2 import Status
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData, SessionEndInfo, SessionStartInfo
from tensorboard.plugins.text.summary_v2 import text_pb
from tensorboard.summary.writer.record_writer import RecordWriter

from seqlab.reporting.results import STATUSES
from seqlab.reporting.statistics import Members, spread

END_STATUS = {"finished": Status.STATUS_SUCCESS, "diverged": Status.STATUS_FAILURE}


@final
class TensorBoard:
    """Writes one run: means over members into its directory, the lowest and highest member into sibling runs.

    The siblings are `directory`/low and `directory`/high with the same tags, so that TensorBoard overlays the three;
    a single member has none. Where members have several learning rates the mean of those of each is one sibling more,
    `directory`/lr=0.001.
    """

    def __init__(self, directory: Path, first_step: int, rates: Sequence[float] = ()):
        """Opens a session that goes on from `first_step`: 0, or the step of the checkpoint it resumed from.

        Args:
            rates: the learning rate of each of the P members.

        Steps beyond `first_step` that an earlier session wrote before it was killed are void: TensorBoard drops them,
        because the session log of this one starts there.
        """
        self._directory = directory
        self._first_step = first_step
        self._rates = np.asarray(rates)
        if not first_step:  # nothing of a session before it counts; TensorBoard itself would keep its texts
            for file in directory.rglob("events.out.tfevents.*"):
                file.unlink()
        self._writers: dict[str, RecordWriter] = {}
        self._writer("")

    def __enter__(self) -> "TensorBoard":
        return self

    def __exit__(self, *exception) -> None:
        self.close()

    def scalars(self, step: int, values: Mapping[str, Members]) -> None:
        """Writes the values of all P members ([P]) under each tag; members that are not finite are left out.

        Where no member is finite the mean is NaN, which TensorBoard marks, and the siblings have a gap. Values of a
        part of the population, such as the outcome of the chosen rate, are not told apart by rate.
        """
        rates = np.unique(self._rates)
        for tag, members in values.items():
            mean, low, high = spread(members)
            self._scalar("", step, tag, mean)
            if np.size(members) > 1 and np.isfinite(mean):
                self._scalar("low", step, tag, low)
                self._scalar("high", step, tag, high)
            if len(rates) > 1 and np.size(members) == len(self._rates):
                for rate in rates:
                    its = spread(np.asarray(members)[self._rates == rate]).mean
                    if np.isfinite(its):
                        self._scalar(f"lr={rate:g}", step, tag, its)

    def figure(self, tag: str, step: int, figure: Figure) -> None:
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi=120)
        png = buffer.getvalue()
        width, height = struct.unpack(">II", png[16:24])  # of the header chunk that every PNG starts with
        image = Summary.Image(encoded_image_string=png, width=width, height=height, colorspace=4)
        self._write("", step, Summary(value=[Summary.Value(tag=tag, image=image)]))

    def text(self, tag: str, step: int, markdown: str) -> None:
        self._write("", step, text_pb(tag, markdown))

    def session_start(self, hparams: Mapping[str, Any], group: str) -> None:
        """Writes one row of the HParams table.

        There is deliberately no Experiment proto: without one TensorBoard takes the union of the columns of all runs,
        and every scalar tag as a metric, so that different models share one table (with one in each run it would pick
        one of them; tensorboard#5596). In a resumed run the first row stands.

        Args:
            hparams: a flat dict. None is left out (as a string it would turn a column of numbers into one of strings);
                what is neither a number, a boolean nor a string is shown as its string.
            group: the same for runs that differ in nothing but their seed; TensorBoard averages those.
        """
        info = SessionStartInfo(group_name=group, start_time_secs=time.time())
        for name, value in hparams.items():
            if isinstance(value, np.generic):
                value = value.item()
            if isinstance(value, bool):
                info.hparams[name].bool_value = value
            elif isinstance(value, int | float):
                info.hparams[name].number_value = value
            elif value is not None:
                info.hparams[name].string_value = str(value)
        self._hparams(hparams_metadata.SESSION_START_INFO_TAG, HParamsPluginData(session_start_info=info), 0)

    def session_end(self, status: str, metrics: Mapping[str, Members], step: int) -> None:
        """Writes the last metrics ([P] each), which TensorBoard shows in the row of the run, and how the run ended.

        A run that was interrupted or failed gets no end, since the same command resumes it and TensorBoard would keep
        the first end that it reads.

        Raises:
            ValueError: the status is not one that results.json knows.
        """
        if status not in STATUSES:
            raise ValueError(f"a run cannot end with the status {status!r}; it must be one of {', '.join(STATUSES)}")
        self.scalars(step, metrics)
        if status in END_STATUS:
            info = SessionEndInfo(status=END_STATUS[status], end_time_secs=time.time())
            self._hparams(hparams_metadata.SESSION_END_INFO_TAG, HParamsPluginData(session_end_info=info), step)
        self.flush()

    def flush(self) -> None:
        """Puts on disk what was written so far; due at each checkpoint, which may know of nothing that is not there."""
        for writer in self._writers.values():
            writer.flush()

    def close(self) -> None:
        for writer in self._writers.values():
            writer.close()

    def _writer(self, sibling: str) -> RecordWriter:
        if sibling not in self._writers:
            directory = self._directory / sibling
            directory.mkdir(parents=True, exist_ok=True)
            name = f"events.out.tfevents.{time.time_ns()}.{socket.gethostname()}.{os.getpid()}"
            # written here and not, as by tensorboard's own EventFileWriter, in a thread, whose failures come late
            writer = RecordWriter((directory / name).open("xb", buffering=0))
            # TensorBoard drops what lies at the step of the START or beyond it, and the step of the checkpoint is kept.
            start = self._first_step + 1 if self._first_step else 0
            log = SessionLog(status=SessionLog.START)
            for event in (Event(file_version="brain.Event:2"), Event(step=start, session_log=log)):
                event.wall_time = time.time()
                writer.write(event.SerializeToString())
            self._writers[sibling] = writer
        return self._writers[sibling]

    def _write(self, sibling: str, step: int, summary: Summary) -> None:
        event = Event(wall_time=time.time(), step=step, summary=summary)
        self._writer(sibling).write(event.SerializeToString())

    def _scalar(self, sibling: str, step: int, tag: str, value: float | np.ndarray) -> None:
        self._write(sibling, step, Summary(value=[Summary.Value(tag=tag, simple_value=np.asarray(value).item())]))

    def _hparams(self, tag: str, content: HParamsPluginData, step: int) -> None:
        description = hparams_metadata.create_summary_metadata(content)
        value = Summary.Value(tag=tag, metadata=description, tensor=hparams_metadata.NULL_TENSOR)
        self._write("", step, Summary(value=[value]))
