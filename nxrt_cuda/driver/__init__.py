"""The seam between a GPU and no GPU: one protocol, two implementations."""
