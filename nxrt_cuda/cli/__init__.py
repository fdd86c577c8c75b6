"""The command line: ``python -m nxrt_cuda doctor | demo | run``; one module a command, and what they share."""
