"""Kernel objects: validation, geometry, the choice of variant, launches and statistics of each operator."""
