"""The process: usage, help, interrupts and pipes."""

from __future__ import annotations

import os
import signal

import nxrt_cuda as nx
from tests.cli.commands import process, start
from tests.cli.conftest import Call


def test_without_a_command_the_usage_is_named() -> None:
    """A bare call says what is missing and where help is, with status 2."""
    done = process()
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "nxrt_cuda: the following arguments are required: COMMAND; see python -m nxrt_cuda --help\n"


def test_run_help_lists_every_operator_and_its_inputs(call: Call) -> None:
    """What a file has to hold is in the help."""
    status, out, _ = call("run", "--help")
    assert status == 0
    assert "ai.onnx::Attention: query, key, value [, attn_mask, total_lengths, past_lengths]" in out
    assert "pkg.nxrt::DsaIndexSelect: query, key, weights, attention_bias" in out
    for domain, op_type in nx.registered_ops():
        assert f"{domain or 'ai.onnx'}::{op_type}: " in out


def test_an_interrupt_ends_quietly_with_130() -> None:
    """SIGINT while a command works: no traceback, status 130; even where the tests were started with it ignored."""
    script = (
        "import os, signal, sys\n"
        "from nxrt_cuda.__main__ import main\n"
        "from nxrt_cuda.cli import demo\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "demo.open_device = lambda name: os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.exit(main(['demo']))\n"
    )
    done = start("-c", script)
    assert (done.returncode, done.stdout, done.stderr) == (128 + signal.SIGINT, "", "")


def test_a_closed_pipe_ends_quietly() -> None:
    """A reader that goes away, as head does, leaves no traceback."""
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = start("-m", "nxrt_cuda", "demo", "--device", "host", stdout=writer)
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, "")
