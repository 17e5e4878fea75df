"""Deployments on this node: their incarnations, their ranks, and where the state of each rank
is."""
