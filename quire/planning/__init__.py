"""Settings that are chosen automatically (`auto_config.resolve`); how memory is divided (`memory_plan.plan_memory`)."""
