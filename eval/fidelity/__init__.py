"""How far every arm is from recompute inside the model: hidden states, logits, likeliest tokens."""
