"""How long things take: what hardware can do, and roofline times of steps. Plain arithmetic, no torch."""
