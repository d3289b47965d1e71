"""Who can answer an attention call: backends as data, one small module each, and their registry (base.py)."""
