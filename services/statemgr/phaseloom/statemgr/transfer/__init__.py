"""The one engine that moves weights versions, tensor slices and state files between nodes.

The packages `versions` and `seals` say what is fetched and served; the engine does not know what
the bytes mean.
"""
