"""`python -m sdk new`: a distribution with an engine or rollout that works, to be made one's own.

The templates beside this file are distributions themselves: our linters and type checker read them, and what is made of
them differs by names alone.
"""
