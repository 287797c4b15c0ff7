"""What ranks that divide a layer tell one another while they compute: sums and parts of tensors."""
