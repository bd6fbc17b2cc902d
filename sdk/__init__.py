"""For authors of plugins: `sdk.parts`, what training engines share; `sdk.testing`, real ranks and tiny models."""
