"""Forked children, and the end of the interpreter: both quiet, both with status 0."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

PRELUDE = """
import gc, os, sys, threading, time
import numpy as np
import nxrt_cuda as nx
from tests.small_kernels import ADD_ONE, HOST_ENTRIES, SLOW

rt = nx.open_runtime("host", host_entries=HOST_ENTRIES)
x = rt.zeros((4,), nx.float32)
launch = ADD_ONE.prepare(rt, 4, x, 4)
with rt.capture() as graph:
    rt.launch(launch)
"""

FORK = """
def in_child(body):
    child = os.fork()
    if child == 0:
        try:
            body()
        except BaseException:
            sys.excepthook(*sys.exc_info())
            os._exit(1)
        sys.exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0

def refused(call):
    try:
        call()
    except nx.RuntimeStateError as error:
        assert "'spawn'" in str(error), error
    else:
        raise AssertionError("not refused")
"""


def ends_quietly(script: str, *, fork: bool = False) -> None:
    """Run ``script`` after the prelude in a process of its own: status 0, nothing on stderr."""
    text = PRELUDE + (FORK if fork else "") + textwrap.dedent(script)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", text],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env=environment,
    )
    assert done.stderr == ""
    assert done.returncode == 0


# Forks.


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
@pytest.mark.parametrize(
    "script",
    [
        pytest.param(
            """
            pending, mark, raw = rt.read_async(x), rt.record_event(), rt.alloc_raw(4)
            rt.begin_graph_capture(); rt.launch(launch); rt.end_graph_capture()

            def child():
                for call in (
                    rt.synchronize, x.numpy, pending.numpy, graph.replay, lambda: rt.launch(launch),
                    lambda: rt.zeros((4,), nx.float32), lambda: rt.from_array(np.ones(4)), rt.begin_graph_capture,
                    rt.replay_graph, lambda: rt.alloc_raw(4), lambda: rt.copy(x.narrow(0, 0, 2), x.narrow(0, 2, 2)),
                    rt.check_capture_error,
                    rt.record_event, graph.close, rt.end_graph_capture, lambda: rt.capture().__enter__(),
                    lambda: rt.nvrtc_function("m", "", "scale", []), lambda: rt.wait_for_stream(1), rt.trim_pool,
                    lambda: mark.elapsed_time(mark), x.__dlpack__,
                ):
                    refused(call)

            in_child(child)
            graph.replay()
            assert x.numpy().tolist() == [1] * 4
            """,
            id="every call is refused, and the parent goes on",
        ),
        pytest.param(
            """
            calls = rt._driver.calls_total

            def child():
                global x, launch, graph, rt
                driver = rt._driver
                cycle = [x, graph, launch]
                cycle.append(cycle)
                del x, launch, graph, cycle
                gc.collect()
                rt.close()
                rt.close()
                assert rt.is_closed
                del rt
                gc.collect()
                assert driver.calls_total == calls

            in_child(child)
            """,
            id="finalisers and close do nothing",
        ),
        pytest.param(
            """
            def child():
                with nx.open_runtime("host", host_entries=HOST_ENTRIES) as own:
                    y = own.zeros((4,), nx.float32)
                    own.launch(ADD_ONE.prepare(own, 4, y, 4))
                    assert y.numpy().tolist() == [1] * 4

            in_child(child)
            """,
            id="the child may open a host runtime of its own",
        ),
        pytest.param(
            """
            holding, done = threading.Event(), threading.Event()

            def hold():
                with rt.capture():
                    rt.launch(launch)
                    holding.set()
                    done.wait()

            thread = threading.Thread(target=hold)
            thread.start()
            holding.wait()
            in_child(lambda: refused(rt.synchronize))
            done.set()
            thread.join()
            """,
            id="a lock that another thread held at the fork does not hang the child",
        ),
        pytest.param(
            """
            with rt.capture() as second:
                rt.launch(launch)
                child = os.fork()
                if child == 0:
                    refused(lambda: rt.launch(launch))
                    refused(rt.end_graph_capture)
                    rt.abort_graph_capture()
                    assert not rt.is_capturing()
                    os._exit(0)
                assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
                rt.launch(launch)
            assert second.node_count == 2
            """,
            id="a fork in a capture leaves the parent's capture alone",
        ),
        pytest.param(
            """
            child = None
            try:
                with rt.capture():
                    rt.launch(launch)
                    child = os.fork()
            except nx.RuntimeStateError as error:
                assert child == 0 and "'spawn'" in str(error)
                sys.exit(0)
            assert child
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
            """,
            id="leaving the with block of an inherited capture is refused",
        ),
        pytest.param(
            """
            from nxrt_cuda import devices
            from nxrt_cuda.driver.host import HostDriver

            # As if the GPU's driver had been started in this process.
            loaded = HostDriver(), os.getpid()
            devices._load_cuda_driver = lambda: loaded

            def child():
                refused(lambda: nx.open_runtime("cuda:0"))
                refused(nx.open_runtime)

            in_child(child)
            """,
            id="the child of a process that used the GPU cannot open it",
        ),
    ],
)
def test_a_forked_child_is_told_to_spawn(script: str) -> None:
    ends_quietly(script, fork=True)


# The end of the interpreter.


@pytest.mark.parametrize(
    "script",
    [
        pytest.param("graph.replay(); rt.launch(launch)", id="queued work, open graphs, globals"),
        pytest.param("rt.close()", id="a closed runtime and what outlives it"),
        pytest.param(
            "cycle = [rt, x, graph, rt.read_async(x), rt.record_event()]; cycle.append(cycle); del cycle, x, rt, graph",
            id="reference cycles",
        ),
        pytest.param("rt.begin_graph_capture(); rt.launch(launch)", id="an open capture"),
        pytest.param(
            """
            with rt.capture():
                rt.launch(launch)
                sys.exit(0)
            """,
            id="exit from inside a capture",
        ),
        pytest.param("capsule = x.__dlpack__(); array = np.from_dlpack(x); del x", id="exports never consumed"),
        pytest.param(
            """
            kept = [np.from_dlpack(rt.zeros((3,), nx.float32)), x.__dlpack__(), x.__dlpack__(max_version=(1, 0))]
            kept.append(kept)
            """,
            id="exports in a reference cycle",
        ),
        pytest.param(
            """
            class Module: pass
            sys.modules["holder"] = holder = Module()
            holder.things = [rt, x, graph, rt.alloc_graph_stable(4), x.__dlpack__(max_version=(1, 0))]
            """,
            id="held by another module",
        ),
        pytest.param(
            """
            class Late:
                def __del__(self):
                    for call in (x.numpy, graph.replay, x.free, rt.close):
                        try:
                            call()
                        except nx.NxrtError:
                            pass
            late = Late()
            late.self = late
            """,
            id="used by a finaliser after the end",
        ),
        pytest.param(
            """
            def work():
                for _ in range(300):
                    rt.launch(launch)
                    rt.zeros((100,), nx.float32).copy_from(np.ones(100, np.float32))
                rt.synchronize()

            threading.Thread(target=work).start()
            """,
            id="a running thread",
        ),
        pytest.param(
            """
            def work():
                while True:
                    try:
                        rt.launch(launch)
                        x.numpy()
                    except nx.NxrtError:
                        time.sleep(1)

            threading.Thread(target=work, daemon=True).start()
            time.sleep(0.05)
            """,
            id="a running daemon thread",
        ),
        pytest.param(
            """
            begun = threading.Event()

            def work():
                with rt.capture():
                    rt.launch(launch)
                    begun.set()
                    time.sleep(1000)

            threading.Thread(target=work, daemon=True).start()
            begun.wait()
            """,
            id="a daemon thread that never ends its capture",
        ),
        pytest.param(
            """
            from nxrt_cuda.driver.host import HostDriver
            from tests.small_kernels import open_on
            try:
                open_on(HostDriver(total_memory=100))
            except nx.OutOfMemoryError:
                pass
            """,
            id="a runtime that could not be opened",
        ),
        pytest.param("others = [nx.open_runtime('host') for _ in range(3)]", id="several runtimes"),
    ],
)
def test_the_interpreter_ends_quietly(script: str) -> None:
    ends_quietly(script)


def test_an_error_of_the_program_is_all_that_is_printed() -> None:
    text = PRELUDE + "with rt.capture():\n    rt.launch(launch)\n    raise ZeroDivisionError('mine')\n"
    done = subprocess.run(
        [sys.executable, "-c", text],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "ZeroDivisionError: mine"
    assert done.stderr.count("Traceback") == 1
