"""What every part may import: configuration, messages between processes, child processes, clocks, an HTTP client."""
