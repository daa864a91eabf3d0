"""MiMo-V2-Flash, MiMo-V2.5 and MiMo-V2.5-Pro (text part)."""
