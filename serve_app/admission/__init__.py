"""Which requests run, and with which QoS: API keys, limits, priorities and deadlines."""
