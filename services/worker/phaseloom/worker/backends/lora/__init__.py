"""Low-rank adapters (LoRA): their layers, their versions, and the base that they share."""
