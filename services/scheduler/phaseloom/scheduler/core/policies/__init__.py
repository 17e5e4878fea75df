"""Policies: pure functions, one file each, registered in `registry`.

An ordering policy reads a `device_view.DeviceView`, a placement policy a `state.cluster.Cluster`, a
multiplexing policy a `sharing_view.SharingView`.
"""
