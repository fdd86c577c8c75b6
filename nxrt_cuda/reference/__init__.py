"""The oracles: what every kernel is measured against, and what the host driver runs in its place."""

from nxrt_cuda.reference import attention, dsa_certified, dsa_index_select

__all__ = ["HOST_ENTRIES"]

HOST_ENTRIES = {**attention.HOST_ENTRIES, **dsa_index_select.HOST_ENTRIES, **dsa_certified.HOST_ENTRIES}
