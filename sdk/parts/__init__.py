"""Parts that training engines share, first- or third-party. They know `core` and torch, and no engine."""
