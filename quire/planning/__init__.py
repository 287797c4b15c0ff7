"""What is decided before anything is loaded: open settings, and how memory is divided."""
