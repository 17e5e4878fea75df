"""The same round trip in other systems: programs for an environment that has these installed.

`loadtest.peering` runs each as `python <file>`. It imports nothing of ours and speaks JSON lines:
it writes `{"name": …, "what": …, "versions": {…}}` when it is up, then answers every line
`{"in_flight": …, "count": …}` with `{"times_s": […], "wall_s": …}`, and ends with its input.
"""
