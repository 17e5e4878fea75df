"""The life of worker-process groups: start, loss, rebuild (`wpgs`), and moves between nodes
(`moves`)."""
