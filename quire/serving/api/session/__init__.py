"""The API process's side of the engines; `session.py` comes first, and says where the rest is."""
