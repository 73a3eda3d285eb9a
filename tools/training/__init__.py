"""The trainer behind `tools/train.py`: small causal language models over bytes, stepped by
mp_optim."""
