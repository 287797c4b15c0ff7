"""A child process, both sides of it: how it is started and watched, what it is told and what it reports back."""
