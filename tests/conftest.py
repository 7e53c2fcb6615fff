pytest_plugins = ["nats_fixtures"]
