"""`strata demo`: a small training run whose worker is killed, and the proof that nothing came of it."""
