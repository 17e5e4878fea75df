"""The one engine that moves weights versions, tensor slices and state files between nodes."""
