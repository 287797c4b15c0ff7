"""LoRA adapters: their files, their weights on host and device, and which tokens of a step they change.

h = W x + scale · B A x (Hu et al. 2021, "LoRA: Low-Rank Adaptation of Large Language Models"), in the form of PEFT's
files. Any number of adapters serve one step.
"""
