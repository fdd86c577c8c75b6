"""What a captured graph is made of: segments, and the work that the runtime recorded in them, node by node.

A node keeps what its work was recorded with, arguments included, in memory of its own: kernel objects renew
theirs at every execution, and the driver's copy cannot be edited.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from nxrt_cuda.activity import Activity
from nxrt_cuda.driver.base import Driver

if TYPE_CHECKING:
    from nxrt_cuda.launch import PreparedLaunch
    from nxrt_cuda.tensor import MemoryOwner, TensorView

__all__ = ["CopyWork", "FillWork", "LaunchWork", "Node", "Segment", "Work"]


class Work(ABC):
    """What a node does.

    Attributes:
        addresses: the device addresses among its parameters.
    """

    addresses: tuple[int, ...]

    @property
    def state(self) -> Any:
        """All parameters as they are now, for :meth:`restore`."""
        return self.addresses

    def restore(self, state: Any) -> None:
        """Undo what was written since ``state`` was read."""
        self.addresses = state

    def write(self, addresses: tuple[int, ...], scalars: Mapping[int, Any]) -> None:
        """New addresses, and new numbers by the position of their parameter; the driver does not know them yet.

        Raises:
            LaunchError: a number is not of the declared kind, or does not fit.
        """
        self.addresses = addresses

    @abstractmethod
    def activity(self, label: str) -> Activity:
        """The work in traces and pictures."""

    @abstractmethod
    def update(self, driver: Driver, executable: int, node: int, context: int) -> None:
        """Give the parameters to ``node`` of an executable."""

    @abstractmethod
    def update_template(self, driver: Driver, node: int, context: int) -> None:
        """Give the parameters to ``node`` of the graph that executables are made from."""


class LaunchWork(Work):
    """A kernel."""

    def __init__(self, launch: PreparedLaunch) -> None:
        self.launch = launch.copy()
        self.launch.operands = ()  # the node has them, and lets go of those that are replaced
        places = self.launch.addresses()
        self._positions = tuple(places)
        self.addresses = tuple(places.values())

    @property
    def state(self) -> Any:
        return self.addresses, self.launch.packed

    def restore(self, state: Any) -> None:
        self.addresses, packed = state
        self.launch.restore(packed)

    def write(self, addresses: tuple[int, ...], scalars: Mapping[int, Any]) -> None:
        for position, present, address in zip(self._positions, self.addresses, addresses, strict=True):
            if address != present:
                self.launch.move(position, address)
        for position, value in scalars.items():
            self.launch.set(position, value)
        self.addresses = addresses

    def activity(self, label: str) -> Activity:
        return self.launch.activity

    def update(self, driver: Driver, executable: int, node: int, context: int) -> None:
        launch = self.launch
        config = launch.config
        driver.graph_exec_kernel_node_set_params(
            executable, node, launch.function.handle, config.grid, config.block, config.shared_bytes, launch.params
        )

    def update_template(self, driver: Driver, node: int, context: int) -> None:
        launch = self.launch
        config = launch.config
        driver.graph_kernel_node_set_params(
            node, launch.function.handle, config.grid, config.block, config.shared_bytes, launch.params
        )


class CopyWork(Work):
    """Bytes from one place in device memory to another."""

    def __init__(self, dst: int, src: int, nbytes: int) -> None:
        self.addresses = (dst, src)
        self.nbytes = nbytes

    def activity(self, label: str) -> Activity:
        return Activity("memcpy", label, {"bytes": self.nbytes})

    def update(self, driver: Driver, executable: int, node: int, context: int) -> None:
        dst, src = self.addresses
        driver.graph_exec_memcpy_node_set_params(executable, node, dst, src, self.nbytes, context)

    def update_template(self, driver: Driver, node: int, context: int) -> None:
        dst, src = self.addresses
        driver.graph_memcpy_node_set_params(node, dst, src, self.nbytes, context)


class FillWork(Work):
    """One byte value over a range of device memory."""

    def __init__(self, dst: int, value: int, nbytes: int) -> None:
        self.addresses = (dst,)
        self.value = value
        self.nbytes = nbytes

    def activity(self, label: str) -> Activity:
        return Activity("memset", label, {"bytes": self.nbytes})

    def update(self, driver: Driver, executable: int, node: int, context: int) -> None:
        (dst,) = self.addresses
        driver.graph_exec_memset_node_set_params(executable, node, dst, self.value, self.nbytes, context)

    def update_template(self, driver: Driver, node: int, context: int) -> None:
        (dst,) = self.addresses
        driver.graph_memset_node_set_params(node, dst, self.value, self.nbytes, context)


@dataclass(eq=False)
class Node:
    """One piece of recorded work.

    Attributes:
        handle: the driver's node.
        label: as in ``CapturedGraph.kernels``.
        position: its index there, within the segment.
        work: what it does.
        operands: the tensors that it works on, as far as they were told.
        raw: memory that it uses by plain address.
    """

    handle: int
    label: str
    position: int
    work: Work
    operands: tuple[TensorView, ...]
    raw: tuple[MemoryOwner, ...] = ()

    @property
    def owners(self) -> dict[MemoryOwner, None]:
        """Whose memory it uses."""
        return dict.fromkeys([*[view.owner for view in self.operands], *self.raw])


@dataclass(eq=False)
class Segment:
    """One instantiated graph and what its replays refer to.

    Attributes:
        graph: the graph that the executable was made from.
        executable: what is replayed.
        node_types: the driver's types of all nodes, those of other libraries included.
        kernels: labels of all recorded work; a copy of no bytes has one, and no node.
        nodes: the work that became nodes, in order.
        edges: which of the driver's nodes come before which.
        owners: the memory that is kept alive, and which nodes use it.
        resources: what the kernels keep alive.
    """

    graph: int
    executable: int
    node_types: tuple[str, ...]
    kernels: tuple[str, ...]
    nodes: tuple[Node, ...]
    edges: tuple[tuple[int, int], ...]
    resources: tuple[Any, ...]
    owners: dict[MemoryOwner, set[Node]] = field(default_factory=dict)

    def pin(self, name: str, others: Iterable[MemoryOwner]) -> None:
        """Keep the memory of every node, and ``others``, from being freed under the graph ``name``."""
        self.owners = {owner: set() for owner in others}
        for node in self.nodes:
            for owner in node.owners:
                self.owners.setdefault(owner, set()).add(node)
        for owner in self.owners:
            owner.pins.append(name)

    def adopt(self, name: str, node: Node, operands: tuple[TensorView, ...]) -> None:
        """``node`` works on ``operands`` from now on; what nothing uses any more may be freed."""
        before = node.owners
        node.operands = operands
        after = node.owners
        for owner in after.keys() - before.keys():
            if owner not in self.owners:
                owner.pins.append(name)
            self.owners.setdefault(owner, set()).add(node)
        for owner in before.keys() - after.keys():
            users = self.owners[owner]
            users.remove(node)
            if not users:
                del self.owners[owner]
                owner.pins.remove(name)

    def arrows(self) -> list[tuple[int, int]]:
        """What :attr:`nodes` wait for, by index, directly or through nodes of other libraries; nothing twice."""
        position = {node.handle: index for index, node in enumerate(self.nodes)}
        after: dict[int, list[int]] = {}
        for first, second in self.edges:
            after.setdefault(first, []).append(second)
        before: dict[int, set[int]] = {index: set() for index in position.values()}
        for handle, index in position.items():
            pending, seen = [*after.get(handle, ())], {handle}
            while pending:
                other = pending.pop()
                if other in position:
                    before[position[other]].add(index)
                elif other not in seen:
                    seen.add(other)
                    pending += after.get(other, ())
        # Nodes were recorded in an order that their edges agree with. One bit says that a node comes earlier.
        earlier: list[int] = []
        arrows = []
        for index, waits_for in before.items():
            indirect = 0
            for other in waits_for:
                indirect |= earlier[other]
            arrows += [(other, index) for other in sorted(waits_for) if not indirect >> other & 1]
            earlier.append(indirect | sum(1 << other for other in waits_for))
        return arrows

    def destroy(self, driver: Driver, name: str) -> None:
        """Give the graph back and let go of what it refers to; after a failure, goes on where it stopped."""
        if self.executable:
            driver.graph_exec_destroy(self.executable)
            self.executable = 0
        if self.graph:
            driver.graph_destroy(self.graph)
            self.graph = 0
        for owner in self.owners:
            owner.pins.remove(name)
        self.owners = {}
        self.nodes = self.resources = ()
