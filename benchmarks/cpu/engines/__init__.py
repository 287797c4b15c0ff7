"""The engines that are compared, a module each: `PACKAGES` that its environment needs, and `Engine`.

`Engine(checkpoint, max_running)` loads; `version` says what was loaded; `generate(prompts, outputs)` decodes greedily,
past any end-of-sequence token, and returns how many tokens each prompt got.
"""
