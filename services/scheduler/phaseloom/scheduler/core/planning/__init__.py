"""Arithmetic on the cluster that placement policies are made of; nothing here is decided or sent.

`groups` keeps the node groups, `nodes` says which nodes a job could take, `admission` is the same
under all policies, `timeline` and `sharing` serve PlexRL's policies, `weave` serves WEAVE's. Called
by placement policies, `wpgs` and `placement`.
"""
