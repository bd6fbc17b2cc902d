"""Parts that engines and rollouts share, first- or third-party. They know core, torch and transformers, and no engine."""
