"""Calculations on the cluster, from which placement policies are built. Nothing is sent from here.

`groups` maintains the node groups. `nodes` finds nodes that fit a job. `admission` is common to all
policies. `timeline` and `sharing` serve PlexRL's policies, `weave` serves WEAVE's. Called by
placement policies, `wpgs` and `placement`.
"""
