"""``demo``: both kernel systems on tensors recorded from a sentence encoder."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import cycle, islice

import numpy as np

import nxrt_cuda
from nxrt_cuda.cli.device import device_line, open_device
from nxrt_cuda.cli.errors import CheckFailedError, CommandError
from nxrt_cuda.cli.inputs import count_from
from nxrt_cuda.cli.operators import Arrays, find_operator
from nxrt_cuda.cli.report import trial_text
from nxrt_cuda.cli.trial import Contents, Trial
from nxrt_cuda.node import Node
from nxrt_cuda.resources import data_directory
from nxrt_cuda.runtime import CudaRuntime

__all__ = ["Recording", "add_parser", "recordings"]

_DESCRIPTION = """\
Run both kernel systems on real tensors: fused attention on the first layer of a sentence encoder, and the
selection of keys for sparse attention on its fourth. Each is executed eagerly, captured into a graph, and
replayed while the contents of its inputs change; every result is compared with an oracle in NumPy."""

_SYSTEMS = (
    ("sentence_attention.npz", "attn_mask"),
    ("sentence_dsa.npz", "attention_bias"),
)
"""The recorded file, and the input that hides keys."""

_CONCLUSION = """\
passed: both systems give the oracle's results, eager and replayed, and a replay is one call into the driver:
it launches, compiles, allocates and copies nothing."""

_ON_THE_HOST = """
On the host driver a kernel is the oracle's own code, rounded to its dtype. So these checks are of the runtime,
its memory and its graphs; on a machine with a GPU the same command checks the CUDA kernels."""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the main parser."""
    parser = commands.add_parser("demo", help="run both kernel systems on real tensors", description=_DESCRIPTION)
    add = parser.add_argument
    add("--device", metavar="DEVICE", help='"cuda:0" or "host" (default: a GPU if there is one)')
    add("--replays", metavar="N", type=count_from(1), default=4, help="replays of each graph (default: 4)")
    add("--json", action="store_true", help="print one JSON object instead of tables")
    parser.set_defaults(command=run)


def run(options: argparse.Namespace) -> int:
    """Run the command; see the parser for ``options``."""
    systems = recordings()
    with open_device(options.device) as runtime:
        device = runtime.device
        if not options.json:
            print(f"nxrt_cuda {nxrt_cuda.__version__}\n{device_line(runtime)}")
        reports = []
        for number, recording in enumerate(systems, start=1):
            report = recording.trial(runtime).run(recording.replayed(options.replays), check=True)
            reports.append(report)
            if not options.json:
                print(f"\n{number}. {recording.title}\n\n{trial_text(report, device)}")
    failures = [f"{report.node.op_type} {failure}" for report in reports for failure in report.failures]
    if options.json:
        summary = {"device": device, "passed": not failures, "systems": [report.as_dict() for report in reports]}
        print(json.dumps(summary, indent=2))
    if failures:
        raise CheckFailedError("; ".join(failures))
    if not options.json:
        print(f"\n{_CONCLUSION}{_ON_THE_HOST if device == 'host' else ''}")
    return 0


def recordings() -> tuple[Recording, ...]:
    """The recorded input of every system.

    Raises:
        CommandError: the files are not there.
    """
    return tuple(Recording.read(name, mask) for name, mask in _SYSTEMS)


@dataclass(frozen=True)
class Recording:
    """One system's recorded input.

    Attributes:
        node: the operator, with its attributes.
        arrays: its inputs.
        mask: the input that hides keys from queries.
        title: what was recorded.
    """

    node: Node
    arrays: Arrays
    mask: str
    title: str

    @classmethod
    def read(cls, name: str, mask: str) -> Recording:
        path = data_directory() / name
        try:
            with np.load(path, allow_pickle=False) as archive:
                meta = json.loads(str(archive["meta"]))
                node = Node(**meta["node"])
                arrays = {name: archive[name] for name in find_operator(node.op_type).inputs if name in archive}
        except OSError as error:
            raise CommandError(f"the recorded tensors are not part of this installation: {error}") from None
        model, _, _ = meta["model"].partition(",")
        title = f"{node.op_type}: layer {meta['layer']} of {model}, over {len(meta['sentences'])} texts"
        return cls(node, arrays, mask, title)

    def trial(self, runtime: CudaRuntime) -> Trial:
        return Trial(runtime, find_operator(self.node.op_type), self.node, Contents("as recorded", self.arrays))

    def replayed(self, count: int) -> list[Contents]:
        """Contents for ``count`` replays, each unlike the one before."""
        return list(islice(cycle(self._variations()), count))

    def _variations(self) -> Iterator[Contents]:
        arrays = self.arrays
        yield Contents("texts in reverse order", {name: array[::-1] for name, array in arrays.items()})
        yield Contents("queries negated", {**arrays, "query": -arrays["query"]})
        hidden = arrays[self.mask].copy()
        hidden[..., hidden.shape[-1] // 2 :] = -np.inf
        yield Contents("later half of the keys hidden", {**arrays, self.mask: hidden})
        yield Contents("as recorded", arrays)
