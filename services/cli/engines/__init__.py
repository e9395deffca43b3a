"""The engines of `unbroken worker`: for each its options, their checks, and how to create the engine."""
