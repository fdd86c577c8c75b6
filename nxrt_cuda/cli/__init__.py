"""The command line: ``python -m nxrt_cuda doctor | demo | run | compile | bench``.

One module a command, and what they share.
"""
