"""``interlock verify``: the same text through two engines, compared token by token, with causes.

Read ``run.py`` first. ``arm.py`` is what is compared, ``compare.py`` the measure, ``diagnose.py`` the search
for causes, ``attribute.py`` its core.
"""
