"""Host copies that are held once for all whose bytes are equal."""
