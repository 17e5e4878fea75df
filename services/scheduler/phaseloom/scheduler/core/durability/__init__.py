"""The durability of a deployment: seals, replicas, and the weights versions that are kept."""
