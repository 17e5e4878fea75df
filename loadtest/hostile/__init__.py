"""Hostile tenants: what one tenant can send, and what another one notices."""
