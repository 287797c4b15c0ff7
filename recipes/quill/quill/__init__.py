"""How Quill, the built-in model of Quire, is made: its world, its tokenizer, its training and its examination."""
