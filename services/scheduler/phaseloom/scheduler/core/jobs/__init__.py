"""The life of jobs, deployments and sessions, and the consequences of outcomes."""
