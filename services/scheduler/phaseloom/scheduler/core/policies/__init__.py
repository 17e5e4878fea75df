"""Policies: pure functions, each in a file of its own and on one line of `registry`.

An ordering policy is shown a `device_view.DeviceView`, a placement policy a
`state.cluster.Cluster`.
"""
