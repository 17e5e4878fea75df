"""Arithmetic on the cluster that placement policies are made of; nothing here is decided or sent.

`groups` keeps the node groups, `admission` says what fits on a node, `timeline` and `sharing` serve
PlexRL's policies, `weave` serves WEAVE's. Called by placement policies, `wpgs` and `placement`.
"""
