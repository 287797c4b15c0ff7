"""The `quire` command. Flags are generated from dataclass fields."""
