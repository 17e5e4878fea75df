"""Arithmetic on the cluster that placement policies are made of; nothing here is decided or sent.

`groups` keeps node groups, `admission` says what fits a node, `timeline` and `sharing` are
PlexRL's, `weave` is WEAVE's. Called by placement policies, `wpgs` and `placement`.
"""
