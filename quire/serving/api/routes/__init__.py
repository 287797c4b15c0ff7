"""The endpoints, one a file: each makes a router from what it is given."""
