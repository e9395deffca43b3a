"""What holds for all tests: an example that Hypothesis makes up may take as long as the machine takes."""

from hypothesis import HealthCheck, settings

settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")
