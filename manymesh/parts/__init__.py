"""Parts that engines and rollouts share, first- or third-party. They know core, torch, transformers, and no engine."""
