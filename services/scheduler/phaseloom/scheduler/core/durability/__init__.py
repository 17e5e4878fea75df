"""The durable state of deployments: seals, weights versions, and their replicas on other nodes.

Called by `wpgs`, `dispatch`, `placement` and `jobs`.
"""
