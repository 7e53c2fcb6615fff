"""What holds for every test: a bus for those that ask, and properties that do not depend on the machine's load."""

from hypothesis import HealthCheck, settings

pytest_plugins = ["nats_fixtures"]

settings.register_profile("house", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("house")
