"""The `quire` command: one subcommand a file; flags are generated from dataclass fields."""
