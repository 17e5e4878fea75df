"""`make gpu-check`: proofs on this machine's GPU. Needs torch and the standard library only."""
