"""Scores, one file each: per time first, averaging over time comes later.

A metric has

- `per_time(fields) -> dict of arrays`: statistics of one forecast, each (leads, levels, regions[, extra]), whose mean
over
  initial times is what the score is made from;
- `finish(means) -> array`: the score from those means (roots and ratios are taken after all averaging);
- `NEEDS`: what has to be there for it: `members`, `climatology`, `precipitation`;
- `EXTRA`: the name of a further last dimension, or None.

Definitions are those of WeatherBench2 (Rasp et al. 2024, doi:10.1029/2023MS004019).
"""

from __future__ import annotations
