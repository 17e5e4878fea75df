"""GPU memory that can be freed and allocated again at the same address, through the CUDA driver.

Imports only the standard library and torch. `state` uses it.
"""
