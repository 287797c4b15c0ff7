"""`quire simulate`: a load on the real scheduler, with steps that a cost model times, on a clock of its own."""
