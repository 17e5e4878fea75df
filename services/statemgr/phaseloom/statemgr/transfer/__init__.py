"""The one engine that moves weights versions, tensor slices and state files between nodes.

`versions` and `seals` say what is fetched and served; the engine knows of neither.
"""
