"""What a killed daemon leaves to the next one."""
