"""A frontend of several processes that share its ports."""
