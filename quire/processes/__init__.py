"""What a child process is given and what it reports back."""
