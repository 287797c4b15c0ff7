"""Settings chosen automatically (`auto_config.resolve`); the size of the KV cache (`kv_cache_plan.plan_kv_cache`)."""
