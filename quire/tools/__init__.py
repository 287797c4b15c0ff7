"""Instruments around the engine: benchmarks, simulation, sizing, and checks of quantized checkpoints."""
