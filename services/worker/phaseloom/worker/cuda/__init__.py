"""GPU memory that can be given back and taken again at the same address, over the CUDA driver.

Imports the standard library and torch only. `state` calls it.
"""
