"""For authors of plugins: `sdk.testing` has a world of real ranks and tiny models."""
