"""For authors of plugins: `manymesh.parts`, what backends share; `sdk.testing`, real ranks and tiny models;
`sdk.conformance`, the kit; `python -m sdk`, which makes and checks plugins."""
